// A C++ training program on LibTorch whose GPU memory comes from vramx: no Python in the process.
//
// What it shows: libvramx is vramx's allocator and its interface to torch in one library, made for
// the torch that the program is linked with; one call at the start of main() installs it. The
// program then trains a network on sequences of another length in each step, whose tensors torch's
// own allocator cuts its memory to pieces for.
// What to expect: what is reserved at the peak is within about 1 % of what is allocated; with
// --native torch's own allocator is left in place, for comparison. On a CPU it trains as well, and
// there is no GPU memory to measure. Compression, plans and fused blocks are Python's: there are
// none here.
// Needs: a C++20 compiler, CMake, LibTorch or the torch of a Python environment, and a checkout of
// vramx. CMakeLists.txt has the commands.
//
//     train [--native] [--steps N]
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <random>
#include <string>

#ifdef WITH_VRAMX
#include <c10/cuda/CUDACachingAllocator.h>
#include <vramx.h>
#endif

namespace {

struct Options {
  bool is_native = false;
  int steps = 20;
};

Options parse(int count, char** words) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    if (word == "--native") {
      options.is_native = true;
    } else if (word == "--steps" && i + 1 < count) {
      options.steps = std::atoi(words[++i]);
    } else {
      throw std::runtime_error("usage: train [--native] [--steps N]");
    }
  }
  return options;
}

void install([[maybe_unused]] const Options& options) {
#ifdef WITH_VRAMX
  if (!options.is_native) vramx::install_allocator();  // before anything uses CUDA
#endif
}

void train(const Options& options, torch::Device device) {
  const bool is_large = device.is_cuda();
  const int width = is_large ? 1024 : 32;
  const int longest = is_large ? 4096 : 64;
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(width, 4 * width), torch::nn::GELU(),
                              torch::nn::LayerNorm(torch::nn::LayerNormOptions({4 * width})),
                              torch::nn::Linear(4 * width, width));
  model->to(device);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  std::mt19937 random(0);
  std::uniform_int_distribution<int> lengths(longest / 8, longest);
  for (int step = 0; step < options.steps; ++step) {
    const int length = lengths(random);
    const torch::Tensor rows = torch::randn({8, length, width}, device);
    torch::Tensor loss = torch::mse_loss(model->forward(rows), rows.roll(1, 2));
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    std::printf("step %d: length %d, loss %.4f\n", step, length, loss.item<double>());
  }
}

void report([[maybe_unused]] torch::Device device) {
#ifdef WITH_VRAMX
  if (device.is_cuda()) {
    using namespace c10::cuda::CUDACachingAllocator;
    const DeviceStats stats = getDeviceStats(0);
    const double allocated = static_cast<double>(stats.allocated_bytes[0].peak);  // of all pools
    const double reserved = static_cast<double>(stats.reserved_bytes[0].peak);
    std::printf("%s: allocated %.0f MiB, reserved %.0f MiB, %.3f times that\n",
                get()->name().c_str(), allocated / 1048576, reserved / 1048576,
                reserved / allocated);
    return;
  }
#endif
  std::printf("no CUDA memory was used\n");
}

}  // namespace

int main(int count, char** words) {
  try {
    const Options options = parse(count, words);
    install(options);
    const torch::Device device(torch::cuda::is_available() ? torch::kCUDA : torch::kCPU);
    train(options, device);
    report(device);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
