// The bytes behind the simulated device: physical memory as one memfd, addresses as host mappings.
//
// A chunk is a range of the file, so two mappings of one chunk share bytes; a reserved or merely
// mapped address has PROT_NONE, so touching it faults. Keeps no books: which range is which is the
// business of sim_memory. Not thread-safe: sim_driver holds its lock. A call costs one system call,
// 2-4 us.
#pragma once

#include <cstdint>
#include <memory>

#include "core/status.h"
#include "core/units.h"

namespace vramx {

// A position in the file of physical memory.
enum class PageOffset : std::uint64_t {};

class SimPages {
 public:
  static Result<std::unique_ptr<SimPages>> open();
  ~SimPages();
  SimPages(const SimPages&) = delete;
  SimPages& operator=(const SimPages&) = delete;

  // `alignment` is a multiple of the host's page size.
  Result<Address> reserve(Bytes size, Bytes alignment);
  void release(Address address, Bytes size);

  Status map(Address address, Bytes size, PageOffset offset);  // no access yet
  Status unmap(Address address, Bytes size);                   // back to a bare reservation
  Status allow(Address address, Bytes size);
  void forbid(Address address, Bytes size);  // undoes allow

  // The next free range of the file. The file is sparse and a range is never handed out twice, so
  // a freed chunk costs only its hole.
  PageOffset take_range(Bytes size);
  void discard(PageOffset offset, Bytes size);
  Bytes resident() const;  // physical memory that the host has spent

  static Bytes page_size();

 private:
  explicit SimPages(int file) : file_(file) {}

  const int file_;
  std::uint64_t end_ = 0;
};

}  // namespace vramx
