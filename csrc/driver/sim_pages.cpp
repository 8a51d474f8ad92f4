// System calls behind the simulated device's memory; see the header.
#include "driver/sim_pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <memory>

namespace vramx {
namespace {

// Beyond what any run can create; a sparse file of this length occupies nothing.
constexpr Bytes kFileLength{std::uint64_t{1} << 62};

void* pointer(Address address) { return reinterpret_cast<void*>(address.value); }

// The host may run out of mappings (vm.max_map_count) or of address space: both are this device's
// mapping ceiling. mmap reports nothing else for arguments that sim_memory has checked.
Status outcome(bool done, const char* call) {
  return done ? ok_status() : Status{StatusCode::kOutOfMemory, 2, call};
}

}  // namespace

Result<std::unique_ptr<SimPages>> SimPages::open() {
  const int file = memfd_create("vramx-sim", MFD_CLOEXEC);
  if (file < 0) return Status{StatusCode::kNotInitialized, 0, "memfd_create"};
  std::unique_ptr<SimPages> pages(new SimPages(file));
  if (ftruncate(file, static_cast<off_t>(kFileLength.count)) != 0) {
    return Status{StatusCode::kNotInitialized, 0, "ftruncate"};
  }
  return pages;
}

SimPages::~SimPages() { close(file_); }

Bytes SimPages::page_size() { return {static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE))}; }

Result<Address> SimPages::reserve(Bytes size, Bytes alignment) {
  const Bytes padded = size + alignment;
  void* raw =
      mmap(nullptr, padded.count, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return outcome(false, "mmap");
  const Address start{reinterpret_cast<std::uint64_t>(raw)};
  const Address aligned{round_up({start.value}, alignment).count};
  const Bytes head = aligned - start;
  if (head) munmap(raw, head.count);
  munmap(pointer(aligned + size), (padded - head - size).count);
  return aligned;
}

void SimPages::release(Address address, Bytes size) { munmap(pointer(address), size.count); }

Status SimPages::map(Address address, Bytes size, PageOffset offset) {
  return outcome(mmap(pointer(address), size.count, PROT_NONE, MAP_SHARED | MAP_FIXED, file_,
                      static_cast<off_t>(offset)) != MAP_FAILED,
                 "mmap");
}

Status SimPages::unmap(Address address, Bytes size) {
  return outcome(mmap(pointer(address), size.count, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED,
                 "mmap");
}

Status SimPages::allow(Address address, Bytes size) {
  return outcome(mprotect(pointer(address), size.count, PROT_READ | PROT_WRITE) == 0, "mprotect");
}

void SimPages::forbid(Address address, Bytes size) {
  (void)mprotect(pointer(address), size.count, PROT_NONE);
}

PageOffset SimPages::take_range(Bytes size) {
  const PageOffset offset{end_};
  end_ += size.count;
  return offset;
}

void SimPages::discard(PageOffset offset, Bytes size) {
  (void)fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(size.count));
}

Bytes SimPages::resident() const {
  struct stat info{};
  if (fstat(file_, &info) != 0) return {};
  return Bytes{static_cast<std::uint64_t>(info.st_blocks)} * 512;
}

}  // namespace vramx
