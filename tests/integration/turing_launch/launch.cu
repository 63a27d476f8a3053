// Calls FlashInfer's real prefill launcher for one configuration and prints what became of it.
//
// Compiled for sm_75 and linked with turing_runtime.c in place of CUDA's runtime, so that it runs
// on a machine without a GPU: everything up to the launch is FlashInfer's own host code, the kernel
// is compiled but never executed.
//
// -DDIM=… (of a head) -DTILE_Q=… -DKV_TYPE=half|__nv_fp8_e4m3 -DLAUNCHER=0|1|2 (paged, ragged, single)
#include <cstdio>
#include <exception>

#include <flashinfer/attention/default_prefill_params.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/variants.cuh>

using namespace flashinfer;

constexpr auto POSITIONS = PosEncodingMode::kNone;
constexpr auto MASK = MaskMode::kCausal;
using Variant = DefaultAttention</*custom_mask=*/false, /*sliding_window=*/false,
                                 /*logits_soft_cap=*/false, /*alibi=*/false>;
// the heads of one of two GPUs that share 24 query and 4 key/value heads
constexpr uint32_t QUERY_HEADS = 12, KV_HEADS = 2;

template <uint32_t NUM_MMA_KV>
void print_size() {
  constexpr uint32_t WARPS_Q = get_num_warps_q(TILE_Q), WARPS_KV = get_num_warps_kv(TILE_Q);
  using Traits = KernelTraits<MASK, TILE_Q, get_num_mma_q(TILE_Q), NUM_MMA_KV,
                              DIM / 16, DIM / 16, WARPS_Q, WARPS_KV, POSITIONS, half,
                              KV_TYPE, half, float, int32_t, Variant>;
  std::printf("storage %u %zu %s\n", NUM_MMA_KV, sizeof(typename Traits::SharedStorage),
              Traits::IsInvalid() ? "invalid" : "valid");
}

cudaError_t launch() {
#if LAUNCHER == 0
  BatchPrefillPagedParams<half, KV_TYPE, half, int32_t> params;
  params.padded_batch_size = 4;
  params.num_qo_heads = QUERY_HEADS;
  params.paged_kv.num_heads = KV_HEADS;
  return BatchPrefillWithPagedKVCacheDispatched<TILE_Q, DIM, DIM, POSITIONS,
                                                /*USE_FP16_QK_REDUCTION=*/false, MASK, Variant>(
      params, static_cast<half*>(nullptr), static_cast<float*>(nullptr), /*enable_pdl=*/false,
      /*stream=*/nullptr);
#elif LAUNCHER == 1
  BatchPrefillRaggedParams<half, KV_TYPE, half, int32_t> params;
  params.padded_batch_size = 4;
  params.num_qo_heads = QUERY_HEADS;
  params.num_kv_heads = KV_HEADS;
  return BatchPrefillWithRaggedKVCacheDispatched<TILE_Q, DIM, DIM, POSITIONS,
                                                 /*USE_FP16_QK_REDUCTION=*/false, MASK, Variant>(
      params, static_cast<half*>(nullptr), static_cast<float*>(nullptr), /*enable_pdl=*/false,
      /*stream=*/nullptr);
#else
  SinglePrefillParams<half, KV_TYPE, half> params;
  params.qo_len = 4096;
  params.kv_len = 4096;
  params.num_qo_heads = QUERY_HEADS;
  params.num_kv_heads = KV_HEADS;
  return SinglePrefillWithKVCacheDispatched<DIM, DIM, POSITIONS,
                                            /*USE_FP16_QK_REDUCTION=*/false, MASK, Variant>(
      params, static_cast<half*>(nullptr), /*stream=*/nullptr);
#endif
}

int main() {
  print_size<1>();
  print_size<2>();
  print_size<4>();
  print_size<8>();
  try {
    const cudaError_t status = launch();
    std::printf("returned %d %s\n", static_cast<int>(status), cudaGetErrorString(status));
  } catch (const std::exception& error) {
    std::printf("threw %s\n", error.what());
  }
  return 0;
}
