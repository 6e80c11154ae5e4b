// One variant of the kernel: compiled once for each entry of build.py's table, which defines
//   TANDEM_NAME      its name
//   TANDEM_SHAPE     arguments of Shape
//   TANDEM_EPILOGUE  a type, of the shape S
#include <type_traits>

#include "gradient.cuh"
#include "kernel.cuh"
#include "registry.h"
#include "scan.cuh"

namespace tandem::cuda {
namespace {

using S = Shape<TANDEM_SHAPE>;
using Epilogue = TANDEM_EPILOGUE;
constexpr int kSharedBytes = shared_bytes<S, Epilogue>();
static_assert(kSharedBytes <= 232448, "a block has 227 KiB of shared memory");

template <class E>
typename E::Arguments arguments_of(const Request& r) {
  using Arguments = typename E::Arguments;
  if constexpr (std::is_same_v<E, TileSums<S>>) {
    return Arguments{r.total};
  } else if constexpr (std::is_same_v<E, Rounded<S, true>> || std::is_same_v<E, Rounded<S, false>>) {
    return Arguments{r.factor};
  } else if constexpr (std::is_empty_v<Arguments>) {
    return Arguments{};
  } else {
    return Arguments{r.inverse_temperature, r.anchor, r.target, r.total, r.weighted};
  }
}

void launch(const Request& request) {
  const auto kernel = product<S, Epilogue>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes), "shared memory");
  const CUtensorMap a = tensor_map(request.a, 2, S::A::kBoxRows), b = tensor_map(request.b, 2, S::B::kBoxRows);
  CUtensorMap out{};
  if (Epilogue::kOutColumns > 0) out = tensor_map(request.out, Epilogue::kOutBytes, Staging::kRows);

  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = S::kCluster;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(request.programs / S::kCluster * S::kCluster);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = request.stream;
  config.attrs = &cluster;
  config.numAttrs = S::kCluster > 1 ? 1 : 0;
  const Sizes sizes{request.rows, request.columns, request.depth, request.band};
  check(cudaLaunchKernelEx(&config, kernel, a, b, out, sizes, arguments_of<Epilogue>(request)), TANDEM_NAME);
}

const bool registered =
    variants()
        .emplace(
            TANDEM_NAME,
            Variant{launch, S::kRows, S::kColumns, S::kTurns ? 4 : 4 * kConsumers, kSharedBytes})
        .second;

}  // namespace
}  // namespace tandem::cuda
