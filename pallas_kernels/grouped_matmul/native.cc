// The grouped product on a CPU, as an XLA FFI target. See native.py for the contract.
//
// One unit of work is a tile of rows and a run of outputs. An expert's weight is read where it lies. Every output is a sum
// over vectors of 16 inputs in order, added up by a fixed tree at the end: a row has the same bits in any company.

#include <algorithm>
#include <cstdint>

#include "parallel_for.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using pallas_kernels::kLanes;
using pallas_kernels::Load;
using pallas_kernels::Splat;
using pallas_kernels::Sum;
using pallas_kernels::Vec;

constexpr int64_t kBlock = 4;           // rows and outputs of one block: its 16 sums stay in registers
constexpr int64_t kOutputsPerUnit = 32;
constexpr int64_t kMinParallelWork = 1 << 15;

// output[u, n] for kRows rows and kOutputs outputs.
template <int kRows, int kOutputs, typename W>
void Block(const float* x, const W* weight, int64_t num_inputs, int64_t num_outputs, float* output) {
  Vec sums[kRows][kOutputs];
  for (auto& row : sums)
    for (Vec& sum : row) sum = Splat(0.0f);
  for (int64_t k = 0; k < num_inputs; k += kLanes) {
    Vec weights[kOutputs];
    for (int n = 0; n < kOutputs; ++n) weights[n] = Load(weight + n * num_inputs + k);
    for (int u = 0; u < kRows; ++u) {
      const Vec inputs = Load(x + u * num_inputs + k);
      for (int n = 0; n < kOutputs; ++n) sums[u][n] += inputs * weights[n];
    }
  }
  for (int u = 0; u < kRows; ++u)
    for (int n = 0; n < kOutputs; ++n) output[u * num_outputs + n] = Sum(sums[u][n]);
}

template <int kOutputs, typename W>
void Rows(const float* x, const W* weight, int64_t num_rows, int64_t num_inputs, int64_t num_outputs, float* output) {
  int64_t u = 0;
  for (; u + kBlock <= num_rows; u += kBlock)
    Block<kBlock, kOutputs>(x + u * num_inputs, weight, num_inputs, num_outputs, output + u * num_outputs);
  for (; u < num_rows; ++u) Block<1, kOutputs>(x + u * num_inputs, weight, num_inputs, num_outputs, output + u * num_outputs);
}

template <typename W>
void Tile(const float* x, const W* weight, int64_t first, int64_t end, int64_t num_rows, int64_t num_inputs, int64_t num_outputs,
          float* output) {
  int64_t n = first;
  for (; n + kBlock <= end; n += kBlock) Rows<kBlock>(x, weight + n * num_inputs, num_rows, num_inputs, num_outputs, output + n);
  for (; n < end; ++n) Rows<1>(x, weight + n * num_inputs, num_rows, num_inputs, num_outputs, output + n);
}

ffi::Error GroupedMatmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer weight, ffi::Buffer<ffi::S32> tile_expert,
                         ffi::ResultBuffer<ffi::F32> out) {
  const int64_t num_tiles = x.dimensions()[0], num_rows = x.dimensions()[1], num_inputs = x.dimensions()[2];
  const int64_t num_experts = weight.dimensions()[0], num_outputs = weight.dimensions()[1];
  const int64_t runs = (num_outputs + kOutputsPerUnit - 1) / kOutputsPerUnit;
  const bool is_half = weight.element_type() == ffi::BF16;
  const int32_t* experts = tile_expert.typed_data();
  int64_t num_used = 0;
  while (num_used < num_tiles && experts[num_used] < num_experts) ++num_used;
  const int64_t tile_outputs = num_rows * num_outputs;
  std::fill(out->typed_data() + num_used * tile_outputs, out->typed_data() + num_tiles * tile_outputs, 0.0f);
  const bool is_small = num_used * tile_outputs * num_inputs < kMinParallelWork;
  const int64_t num_threads = is_small ? 1 : std::max<int64_t>(1, pool.num_threads());
  pallas_kernels::ParallelFor(pool, num_used * runs, num_threads, [&](int64_t unit) {
    const int64_t tile = unit / runs, first = unit % runs * kOutputsPerUnit, end = std::min(num_outputs, first + kOutputsPerUnit);
    const int64_t start = experts[tile] * num_outputs * num_inputs;
    const float* rows = x.typed_data() + tile * num_rows * num_inputs;
    float* output = out->typed_data() + tile * tile_outputs;
    if (is_half)
      Tile(rows, static_cast<const uint16_t*>(weight.untyped_data()) + start, first, end, num_rows, num_inputs, num_outputs, output);
    else
      Tile(rows, static_cast<const float*>(weight.untyped_data()) + start, first, end, num_rows, num_inputs, num_outputs, output);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(grouped_matmul, GroupedMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
