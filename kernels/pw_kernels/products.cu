// y = x W^T for few rows of x, with what comes before and after it. Compiled at run time by NVRTC (cuda_products.py), which
// defines the constants named below.
//
//   FLOAT16       1: everything is fp16; 0: bf16
//   N, K          rows and columns of W;  NT: tiles of 8 rows of x
//   WARPS         of a block, which share its columns;  BLOCKS: wanted on a multiprocessor
//   SPLIT         blocks that share the columns of W
//   STAGES        steps of 32 columns that a warp has in flight
//   NORM          1: an RMS norm of the rows of x comes first
//   BIAS          1: a bias is added
//   GATED, KIND   1: W is INNER rows of a gate, as many of what it gates, and others; the result of the others is apart
//   ADD           0: nothing is added; 1: rows of the output's shape; 2: two of them; 3: and the product is times a sigmoid
//
// A block takes tiles of 16 rows of W in turn. The matrix unit multiplies weights [16 rows x 16 k] by tokens [16 k x 8]. A
// lane copies 16 bytes of rows r and r + 8, which are its own operands of two such products once the tokens' columns are
// taken in the same order; x stays in its registers. So nothing is shared between lanes, and the copies of a warp need no
// barrier. Weights do not depend on launches before this one: they are on their way before it waits for those. When its own
// last copies are, the next launch may begin with its copies, and memory does not rest between the two.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
#define DI __device__ __forceinline__
#define UNROLL _Pragma("unroll")

DI void multiply(float* c, const u32* a, u32 b0, u32 b1) {
#if FLOAT16
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#endif
  asm volatile(MMA " {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DI u16 to_half(float v) {
  u16 h;
#if FLOAT16
  asm("cvt.rn.f16.f32 %0,%1;" : "=h"(h) : "f"(v));
#else
  asm("cvt.rn.bf16.f32 %0,%1;" : "=h"(h) : "f"(v));
#endif
  return h;
}
DI float from_half(u16 h) {
#if FLOAT16
  float v;
  asm("cvt.f32.f16 %0,%1;" : "=f"(v) : "h"(h));
  return v;
#else
  return __uint_as_float((u32)h << 16);
#endif
}
// For what a launch that overlaps with this one wrote: not from the cache of a multiprocessor, not before the wait for it.
DI uint4 load_written(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DI u16 load_number(const u16* p) {
  u16 v;
  asm volatile("ld.global.cg.u16 %0,[%1];" : "=h"(v) : "l"(p) : "memory");
  return v;
}
DI float load_sum(const float* p) {
  float v;
  asm volatile("ld.global.cg.f32 %0,[%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
DI void copy_async(u32 to, u64 from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0],[%1],16;" :: "r"(to), "l"(from) : "memory");
}
DI void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DI void wait() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }
#if __CUDA_ARCH__ >= 900
DI void wait_for_earlier() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DI void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
DI void wait_for_earlier() {}
DI void let_next_begin() {}
#endif
DI float rounded(float v) { return from_half(to_half(v)); }
DI float activate(float gate) {
#if KIND == 1
  return gate * 0.5f * (1.0f + erff(gate * 0.7071067811865476f));
#elif KIND == 2
  float inner = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
  return gate / (1.0f + expf(-inner));
#else
  return gate / (1.0f + expf(-gate));
#endif
}

struct Arguments {
  const u16* x;         // [tokens, K]
  const u16* weight;    // [N, K]
  const u16* norm;      // [K]
  const u16* bias;      // [N]
  const u16* add;       // [tokens, N]
  const u16* more;      // [tokens, N] added, too
  const u16* share;     // [tokens] logits
  u16* out;             // [tokens, N], or [tokens, INNER] if GATED
  u16* rest;            // [tokens, N - 2 INNER] if GATED
  u16* normed;          // [tokens, K] what is multiplied, if NORM; or null
  float* parts;         // [tiles, SPLIT, 8 NT, 16] if SPLIT > 1
  u32* arrived;         // [tiles] zeros, and zeros afterwards
  int tokens, x_row, add_row, more_row, share_row;
  float epsilon;
};

constexpr int ROWS = 16, TOKENS = 8 * NT, THREADS = 32 * WARPS;
constexpr int ALL_STEPS = K / 32, BLOCK_STEPS = (ALL_STEPS + SPLIT - 1) / SPLIT, STEPS = (BLOCK_STEPS + WARPS - 1) / WARPS;
constexpr int GATED_TILES = GATED ? INNER / 8 : 0;              // each of 8 rows of the gate and their partners
constexpr int ALL_TILES = GATED_TILES + (N - (GATED ? 2 * INNER : 0) + ROWS - 1) / ROWS;
constexpr int PITCH = ROWS + 4;                                 // of a token's sums: no two lanes meet in a bank
constexpr int RING = WARPS * STAGES * 1024, SUMS = WARPS * TOKENS * PITCH * 4;
// Copies; sums [2, WARPS, TOKENS, PITCH] of a tile and the one before; whether this block is the last; squares [WARPS, TOKENS]
// and weights [K] of the norm.
extern __shared__ __align__(128) unsigned char dynamic[];

// Row of W that row r of a tile is.
DI int weight_row(int tile, int r) {
#if GATED
  if (tile < GATED_TILES) return tile * 8 + (r & 7) + (r >> 3) * INNER;
  return 2 * INNER + (tile - GATED_TILES) * ROWS + r;
#else
  return tile * ROWS + r;
#endif
}

// The weights that a lane copies, step by step through the tiles of its block, and reads in the same order.
struct Weights {
  const u16* start; u64 from[2]; u32 to; const unsigned char* at;
  int row, tile, step, count, slot, taken;
  DI Weights(const Arguments& a, int first, int own, int warp, int lane)
      : start(a.weight + first * 32 + 8 * (lane & 3)), row(lane >> 2), tile(blockIdx.x), step(0), count(own), slot(0), taken(0) {
    int offset = warp * (STAGES * 1024) + lane * 16;
    to = (u32)__cvta_generic_to_shared(dynamic) + offset;
    at = dynamic + offset;
    seek();
  }
  DI void seek() {
    UNROLL for (int j = 0; j < 2; j++) from[j] = (u64)(start + (u64)min(weight_row(tile, row + 8 * j), N - 1) * K);
  }
  // Copies one step more, if there is one.
  DI void copy() {
    if (tile < ALL_TILES) {
      if (step < count) {
        UNROLL for (int j = 0; j < 2; j++) copy_async(to + slot * 1024 + j * 512, from[j] + step * 64);
      }
      slot = slot + 1 == STAGES ? 0 : slot + 1;
      if (++step == STEPS) {
        step = 0;
        tile += gridDim.x;
        if (tile < ALL_TILES) seek(); else let_next_begin();
      }
    }
    commit();
  }
  DI const uint4* take() {
    const uint4* here = (const uint4*)(at + taken * 1024);
    taken = taken + 1 == STAGES ? 0 : taken + 1;
    return here;
  }
};

#if NORM
DI float square_sum(uint4 v) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
  float sum = 0;
  UNROLL for (int i = 0; i < 4; i++) {
    float low = from_half((u16)words[i]), high = from_half((u16)(words[i] >> 16));
    sum += low * low + high * high;
  }
  return sum;
}
DI u32 scaled(u32 x, u32 by, float scale) {
  float low = from_half((u16)x) * scale * from_half((u16)by), high = from_half((u16)(x >> 16)) * scale * from_half((u16)(by >> 16));
  return to_half(low) | (u32)to_half(high) << 16;
}
DI float with_lane(float v, int lane) { return v + __uint_as_float(__shfl_sync(~0u, __float_as_uint(v), lane)); }
#endif

// One number of the result and all that is added to it.
DI void finish(const Arguments& a, int token, int row, float sum) {
#if BIAS
  sum += from_half(a.bias[row]);
#endif
#if ADD == 1
  sum += from_half(load_number(a.add + (u64)token * a.add_row + row));
#elif ADD >= 2
  float before = from_half(load_number(a.add + (u64)token * a.add_row + row));
  before += from_half(load_number(a.more + (u64)token * a.more_row + row));
  float part = rounded(sum);
#if ADD == 3
  part = part / (1.0f + expf(-from_half(load_number(a.share + (u64)token * a.share_row))));
#endif
  sum = before + part;
#endif
#if GATED
  a.rest[(u64)token * (N - 2 * INNER) + row - 2 * INNER] = to_half(sum);
#else
  a.out[(u64)token * N + row] = to_half(sum);
#endif
}

// The results of a tile, once `total` (of a token, of a row of the tile) is complete.
template <class Total> DI void write_out(const Arguments& a, int tile, Total total) {
  for (int i = threadIdx.x; i < TOKENS * ROWS; i += THREADS) {
    int token = i / ROWS, r = i % ROWS, row = weight_row(tile, r);
    if (token >= a.tokens || row >= N) continue;
#if GATED
    if (tile < GATED_TILES) {
      if (r >= 8) continue;
      float gate = total(token, r), up = total(token, r + 8);
#if BIAS
      gate += from_half(a.bias[row]);
      up += from_half(a.bias[row + INNER]);
#endif
      a.out[(u64)token * INNER + row] = to_half(rounded(activate(rounded(gate))) * rounded(up));
      continue;
    }
#endif
    finish(a, token, row, total(token, r));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) product(Arguments a) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, column = 8 * (lane & 3);
  int first = blockIdx.y * BLOCK_STEPS + warp * STEPS;
  int count = min(min(first + STEPS, (int)(blockIdx.y + 1) * BLOCK_STEPS), ALL_STEPS) - first;
  Weights weights(a, first, count, warp, lane);
  for (int i = 0; i < STAGES; i++) weights.copy();
  float* sums = (float*)(dynamic + RING);
  u32* last = (u32*)(dynamic + RING + 2 * SUMS);
#if NORM
  float* squares = (float*)(last + 32);
  uint4* norm = (uint4*)(squares + (WARPS * TOKENS + 31) / 32 * 32);
  constexpr int OWN = (K / 8 + THREADS - 1) / THREADS;
  uint4 own[OWN];
  UNROLL for (int i = 0; i < OWN; i++) own[i] = __ldg((const uint4*)a.norm + min((int)threadIdx.x + i * THREADS, K / 8 - 1));
  u32 zero = (u32)a.tokens >> 31;
#endif
  wait_for_earlier();
  uint4 x[STEPS][NT];
  UNROLL for (int n = 0; n < NT; n++) {
    const u16* from = a.x + (u64)min(8 * n + (lane >> 2), a.tokens - 1) * a.x_row + first * 32 + column;
    UNROLL for (int j = 0; j < STEPS; j++)
      x[j][n] = j < count ? load_written((const uint4*)(from + j * 32)) : make_uint4(0, 0, 0, 0);
  }
#if NORM
  static_assert(SPLIT == 1, "a norm needs all of x");
  UNROLL for (int i = 0; i < OWN; i++)
    if ((int)threadIdx.x + i * THREADS < K / 8) norm[threadIdx.x + i * THREADS] = own[i];
  UNROLL for (int n = 0; n < NT; n++) {
    float sum = 0;
    UNROLL for (int j = 0; j < STEPS; j++) sum += square_sum(x[j][n]);
    sum = with_lane(with_lane(sum, lane ^ 1), lane ^ 2);
    if ((lane & 3) == 0) squares[warp * TOKENS + 8 * n + (lane >> 2)] = sum;
  }
  __syncthreads();
  UNROLL for (int n = 0; n < NT; n++) {
    float sum = 0;
    int token = 8 * n + (lane >> 2);
    for (int w = 0; w < WARPS; w++) sum += squares[w * TOKENS + token];
    float scale = rsqrtf(sum / K + a.epsilon);
    UNROLL for (int j = 0; j < STEPS; j++) {
      if (j >= count) break;
      uint4 v = x[j][n], by = norm[(first + j) * 4 + (lane & 3)];
      v.x ^= zero, v.y ^= zero, v.z ^= zero, v.w ^= zero;       // else it is kept as it was made for the squares, in 64 registers
      x[j][n] = make_uint4(scaled(v.x, by.x, scale), scaled(v.y, by.y, scale), scaled(v.z, by.z, scale), scaled(v.w, by.w, scale));
      if (a.normed && blockIdx.x == 0 && token < a.tokens)
        *(uint4*)(a.normed + (u64)token * K + (first + j) * 32 + column) = x[j][n];
    }
  }
#endif
  for (int tile = blockIdx.x, turn = 0; tile < ALL_TILES; tile += gridDim.x, turn ^= 1) {
    float parts[NT][4] = {};
    UNROLL for (int j = 0; j < STEPS; j++) {
      wait<STAGES - 1>();
      const uint4* here = weights.take();
      if (j < count) {
        uint4 low = here[0], high = here[32];
        u32 left[4] = {low.x, high.x, low.y, high.y}, right[4] = {low.z, high.z, low.w, high.w};
        UNROLL for (int n = 0; n < NT; n++) {
          multiply(parts[n], left, x[j][n].x, x[j][n].y);
          multiply(parts[n], right, x[j][n].z, x[j][n].w);
        }
      }
      weights.copy();
    }
    // Two places in turn: who writes to one has passed the barrier behind which all others have read it.
    float* shared = sums + turn * (SUMS / 4);
    UNROLL for (int n = 0; n < NT; n++)
      UNROLL for (int i = 0; i < 4; i++)
        shared[(warp * TOKENS + 8 * n + 2 * (lane & 3) + (i & 1)) * PITCH + (lane >> 2) + 8 * (i >> 1)] = parts[n][i];
    __syncthreads();
    auto of_block = [&](int token, int r) {
      float sum = 0;
      UNROLL for (int w = 0; w < WARPS; w++) sum += shared[(w * TOKENS + token) * PITCH + r];
      return sum;
    };
#if SPLIT == 1
    write_out(a, tile, of_block);
#else
    float* all = a.parts + (u64)tile * (SPLIT * TOKENS * ROWS);
    for (int i = threadIdx.x; i < TOKENS * ROWS; i += THREADS)
      if (i / ROWS < a.tokens) all[blockIdx.y * (TOKENS * ROWS) + i] = of_block(i / ROWS, i % ROWS);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      *last = atomicAdd(a.arrived + tile, 1) == SPLIT - 1;
      if (*last) a.arrived[tile] = 0;
    }
    __syncthreads();
    if (*last) {
      __threadfence();
      write_out(a, tile, [&](int token, int r) {
        float sum = 0;
        UNROLL for (int y = 0; y < SPLIT; y++) sum += load_sum(all + y * (TOKENS * ROWS) + token * ROWS + r);
        return sum;
      });
    }
#endif
  }
}
