// One contract for every Driver: what core/driver.h promises, checked on the simulated device and,
// unchanged, on a GPU. Prints one line a check and a closing count. The checks are in contract/.
//
// Build and run, from the repository's root:
//   g++ -std=c++20 -O1 -g -Wall -Wextra -Werror -Icsrc -Itests/native -pthread csrc/driver/*.cpp
//       tests/native/driver_contract.cpp tests/native/contract/*.cpp -ldl -o driver_contract
//       (one line; add -fsanitize=address,undefined or -fsanitize=thread)
//   ./driver_contract sim                (or: cuda [ordinal]; a second GPU is taken for its peer)
// Exit 0 when all hold, 1 when one does not, 2 on wrong usage, 77 when cuda is asked for and no
// device answers. Takes about a second.
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "contract.h"
#include "core/units.h"
#include "driver/cuda_driver.h"
#include "driver/cuda_probe.h"
#include "driver/sim_driver.h"

namespace vramx::contract {
namespace {

void run_contract(Device& device) {
  static const std::string kFiles[] = {"memory", "streams", "captures", "peers"};
  device_under_test() = &device;
  run_checks(kFiles);
}

int run_sim() {
  // Small ones: what is filled is some granules, and a thread sanitizer sees each write.
  for (const Bytes granularity : {Bytes{16 << 10}, Bytes{64 << 10}}) {
    auto opened = SimDriver::open({.capacity = granularity * 64, .granularity = granularity});
    if (!opened.ok()) {
      std::printf("the simulated device does not open: %s\n", opened.status().call);
      return 1;
    }
    SimDriver& driver = *opened.value();
    Device device{driver, driver, 1, &driver};
    std::printf("simulated device, granularity %llu KiB\n",
                static_cast<unsigned long long>(granularity.count >> 10));
    run_contract(device);
    if (is_empty(driver)) continue;
    ++tally().failed;
    std::printf("FAILED the contract left the device empty: %s\n", driver.check().c_str());
  }
  std::printf("simulated device alone\n");
  static const std::string kFiles[] = {"sim_memory", "sim_streams"};
  run_checks(kFiles);
  return closing_line();
}

int run_cuda(int ordinal) {
  auto opened = CudaDriver::open(ordinal);
  if (!opened.ok()) {
    const CudaProbe probe = probe_cuda();
    const bool is_absent = probe.device_count == 0;
    std::printf("%s: device %d of %d: %s (%d) %s\n", is_absent ? "skipped" : "FAILED", ordinal,
                probe.device_count, opened.status().call, opened.status().driver_code,
                probe.error.c_str());
    return is_absent ? 77 : 1;
  }
  CudaDriver& driver = *opened.value();
  const int other = ordinal == 0 ? 1 : 0;
  std::unique_ptr<CudaDriver> peer;
  if (probe_cuda().device_count > 1) {
    if (auto found = CudaDriver::open(other); found.ok()) peer = std::move(found.value());
  }
  Device device{driver, driver, peer ? other : -1, peer.get()};
  std::printf("%s, driver %d\n",
              probe_cuda().devices[static_cast<std::size_t>(ordinal)].name.c_str(),
              probe_cuda().driver_version);
  run_contract(device);
  return closing_line();
}

}  // namespace
}  // namespace vramx::contract

int main(int argc, char** argv) {
  const std::string which = argc > 1 ? argv[1] : "";
  if (which == "sim") return vramx::contract::run_sim();
  if (which == "cuda") return vramx::contract::run_cuda(argc > 2 ? std::atoi(argv[2]) : 0);
  std::fprintf(stderr, "usage: driver_contract sim | cuda [ordinal]\n");
  return 2;
}
