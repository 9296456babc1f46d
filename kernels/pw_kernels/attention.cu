// Attention of single queries over paged keys and values, as in decode steps. Compiled at run time by NVRTC
// (cuda_attention.py), which defines the constants named below.
//
//   FLOAT16        1: queries, keys and values are fp16; 0: bf16
//   HEADS, GROUP   key heads; query heads of each;  SIZE: of a head, a power of two;  TOKENS: of a page
//   WARPS          of a block;  AHEAD: keys that a lane has on their way, and as many that it works on
//   PART           keys of a part; each is computed alone, so that a result does not depend on who computes it
//   WINDOW, SOFTCAP, SINKS   1: there is one
//
// A block takes one query and one key head, and parts of its keys in turn. SIZE / 8 lanes share a key; a warp has several
// keys on their way. The parts are merged in order by the block that comes last.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
#define DI __device__ __forceinline__
#define UNROLL _Pragma("unroll")

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
DI float exp2_fast(float v) { float r; asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(v)); return r; }
// For what a launch that overlaps with this one, or another block, wrote.
DI uint4 load_written(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DI int load_int(const int* p) {
  int v;
  asm volatile("ld.global.cg.s32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DI float load_sum(const float* p) {
  float v;
  asm volatile("ld.global.cg.f32 %0,[%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
#if __CUDA_ARCH__ >= 900
DI void wait_for_earlier() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DI void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
DI void wait_for_earlier() {}
DI void let_next_begin() {}
#endif

struct Arguments {
  const u16* q;            // [T, HEADS * GROUP, SIZE]
  const u16* k_pages;      // [P, TOKENS, HEADS, SIZE]
  const u16* v_pages;
  const int* tables;       // [B, M]
  const int* query_start;  // [B + 1]
  const int* seq_lens;     // [B]
  const float* sinks;      // [HEADS * GROUP]
  u16* out;                // [T, HEADS * GROUP, SIZE]
  float* partial;          // [T, HEADS * GROUP, parts, SIZE]
  float* extremes;         // [T, HEADS * GROUP, parts, 2]: maximum (base 2) and sum
  u32* arrived;            // [T * HEADS] zeros, and zeros afterwards
  u64 k_page, k_token, k_head, v_page, v_token, v_head;
  int q_token, q_head, table_row, sequences, parts, programs, window;
  float scale, softcap;
};

constexpr int THREADS = 32 * WARPS;
constexpr int LANES = SIZE / 8 < 32 ? SIZE / 8 : 32, CHUNKS = SIZE / (8 * LANES), SHARED_KEYS = 32 / LANES;
constexpr int TURN = WARPS * SHARED_KEYS * AHEAD, UNITS = WARPS * SHARED_KEYS, PAGES = (PART + TOKENS - 1) / TOKENS + 1;
constexpr float LOG2E = 1.4426950408889634f, LOWEST = -1.0e30f, ABSENT = -3.0e38f;
extern __shared__ __align__(128) unsigned char dynamic[];       // [UNITS, GROUP, SIZE] values; [UNITS, GROUP, 2] extremes; pages of a part; a word

DI float shuffled(float v, int lane) { return __uint_as_float(__shfl_sync(~0u, __float_as_uint(v), lane)); }
DI void unpack(float* to, uint4 v) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
  UNROLL for (int i = 0; i < 4; i++) { to[2 * i] = from_half((u16)words[i]); to[2 * i + 1] = from_half((u16)(words[i] >> 16)); }
}

// Which sequence a query belongs to, and how far it sees.
struct Query {
  int sequence, start, end, length;
  DI Query(const Arguments& a, int token, int lane) : sequence(-1), start(0), end(0), length(0) {
    for (int first = 0; first < a.sequences; first += 32) {
      int b = min(first + lane, a.sequences - 1);
      int begins = load_int(a.query_start + b), ends = load_int(a.query_start + b + 1), keys = load_int(a.seq_lens + b);
      u32 votes = __ballot_sync(~0u, first + lane < a.sequences && begins <= token);
      if (!votes) break;
      int from = 31 - __clz(votes);
      sequence = first + from;
      start = __shfl_sync(~0u, begins, from), end = __shfl_sync(~0u, ends, from), length = __shfl_sync(~0u, keys, from);
    }
  }
};

struct Keys {
  uint4 k[AHEAD][CHUNKS], v[AHEAD][CHUNKS];
  // Keys from `key` on, SHARED_KEYS apart; those from `high` on are read as the last before it. `pages`: by page of a sequence.
  DI void load(const Arguments& a, const int* pages, int head, int key, int high, int column) {
    UNROLL for (int u = 0; u < AHEAD; u++) {
      int at = min(key + u * SHARED_KEYS, high - 1);
      u64 page = (u64)pages[at / TOKENS], slot = at % TOKENS;
      const u16* from_k = a.k_pages + page * a.k_page + slot * a.k_token + head * a.k_head + column;
      const u16* from_v = a.v_pages + page * a.v_page + slot * a.v_token + head * a.v_head + column;
      UNROLL for (int c = 0; c < CHUNKS; c++) {
        k[u][c] = load_written((const uint4*)(from_k + c * LANES * 8));
        v[u][c] = load_written((const uint4*)(from_v + c * LANES * 8));
      }
    }
  }
};

// What a lane has of its keys' result: the part of the values that are its columns.
struct Result {
  float peak[GROUP], mass[GROUP], sum[GROUP][CHUNKS][8];
  DI Result() {
    UNROLL for (int g = 0; g < GROUP; g++) {
      peak[g] = LOWEST, mass[g] = 0;
      UNROLL for (int c = 0; c < CHUNKS; c++) UNROLL for (int i = 0; i < 8; i++) sum[g][c][i] = 0;
    }
  }
  DI void add(const Arguments& a, const float (&q)[GROUP][CHUNKS][8], const Keys& keys, int key, int high, int lane) {
    float score[GROUP][AHEAD];
    UNROLL for (int u = 0; u < AHEAD; u++) {
      UNROLL for (int g = 0; g < GROUP; g++) score[g][u] = 0;
      UNROLL for (int c = 0; c < CHUNKS; c++) {
        float k[8];
        unpack(k, keys.k[u][c]);
        UNROLL for (int g = 0; g < GROUP; g++) UNROLL for (int i = 0; i < 8; i++) score[g][u] += q[g][c][i] * k[i];
      }
    }
    UNROLL for (int step = 1; step < LANES; step *= 2)
      UNROLL for (int g = 0; g < GROUP; g++) UNROLL for (int u = 0; u < AHEAD; u++) score[g][u] += shuffled(score[g][u], lane ^ step);
    UNROLL for (int g = 0; g < GROUP; g++) {
      float higher = peak[g];
      UNROLL for (int u = 0; u < AHEAD; u++) {
#if SOFTCAP
        float half = score[g][u] / a.softcap;
        score[g][u] = a.softcap * (2.0f / (1.0f + exp2_fast(-2.0f * LOG2E * half)) - 1.0f);
#endif
        score[g][u] = key + u * SHARED_KEYS < high ? score[g][u] * LOG2E : ABSENT;
        higher = max(higher, score[g][u]);
      }
      float shrink = exp2_fast(peak[g] - higher);
      peak[g] = higher, mass[g] *= shrink;
      UNROLL for (int c = 0; c < CHUNKS; c++) UNROLL for (int i = 0; i < 8; i++) sum[g][c][i] *= shrink;
      UNROLL for (int u = 0; u < AHEAD; u++) mass[g] += score[g][u] = exp2_fast(score[g][u] - higher);
    }
    UNROLL for (int u = 0; u < AHEAD; u++)
      UNROLL for (int c = 0; c < CHUNKS; c++) {
        float v[8];
        unpack(v, keys.v[u][c]);
        UNROLL for (int g = 0; g < GROUP; g++) UNROLL for (int i = 0; i < 8; i++) sum[g][c][i] += score[g][u] * v[i];
      }
  }
};

DI void finish(const Arguments& a, int token, int query_head, int d, float peak, float mass, float total) {
#if SINKS
  float sink = a.sinks[query_head] * LOG2E, higher = max(peak, sink), shrink = exp2_fast(peak - higher);
  total *= shrink, mass = mass * shrink + exp2_fast(sink - higher);
#endif
  a.out[((u64)token * (HEADS * GROUP) + query_head) * SIZE + d] = to_half(total / mass);
}

extern "C" __global__ void __launch_bounds__(THREADS, 16 / WARPS) attention(Arguments a) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, token = blockIdx.x / a.programs, program = blockIdx.x % a.programs;
  int head = blockIdx.y, column = 8 * (lane % LANES);
  let_next_begin();
  wait_for_earlier();
  Query query(a, token, lane);
  if (token >= query.end) {                                     // of no sequence
    for (int i = threadIdx.x; program == 0 && i < GROUP * SIZE; i += THREADS)
      a.out[((u64)token * HEADS + head) * (GROUP * SIZE) + i] = 0;
    return;
  }
  int position = query.length - query.end + token, low = 0, high = position + 1;
#if WINDOW
  low = max(0, high - a.window);
#endif
  int first_part = low / PART, own_parts = position / PART + 1 - first_part;
  if (program >= own_parts) return;
  float q[GROUP][CHUNKS][8];
  UNROLL for (int g = 0; g < GROUP; g++)
    UNROLL for (int c = 0; c < CHUNKS; c++) {
      unpack(q[g][c], load_written((const uint4*)(a.q + (u64)token * a.q_token + (head * GROUP + g) * a.q_head + c * LANES * 8 + column)));
      UNROLL for (int i = 0; i < 8; i++) q[g][c][i] *= a.scale;
    }
  const int* table = a.tables + (u64)query.sequence * a.table_row;
  float* values = (float*)dynamic;
  float* extremes = values + UNITS * GROUP * SIZE;
  int* pages = (int*)(extremes + UNITS * GROUP * 2);
  u32* last = (u32*)(pages + PAGES);
  int unit = warp * SHARED_KEYS + lane / LANES;
  for (int part = first_part + program; part < first_part + own_parts; part += a.programs) {
    int from = max(low, part * PART), until = min(high, (part + 1) * PART);
    int key = from + warp * (SHARED_KEYS * AHEAD) + lane / LANES, first_page = from / TOKENS;
    for (int i = threadIdx.x; i <= (until - 1) / TOKENS - first_page; i += THREADS) pages[i] = load_int(table + first_page + i);
    __syncthreads();
    const int* by_page = pages - first_page;
    Result result;
    if (from + warp * (SHARED_KEYS * AHEAD) < until) {
      Keys now, next;
      now.load(a, by_page, head, key, until, column);
      for (int turn = from + warp * (SHARED_KEYS * AHEAD); turn < until; turn += TURN, key += TURN) {
        if (turn + TURN < until) next.load(a, by_page, head, key + TURN, until, column);
        result.add(a, q, now, key, until, lane);
        now = next;
      }
    }
    UNROLL for (int g = 0; g < GROUP; g++) {
      UNROLL for (int c = 0; c < CHUNKS; c++)
        UNROLL for (int i = 0; i < 8; i++) values[(unit * GROUP + g) * SIZE + c * LANES * 8 + column + i] = result.sum[g][c][i];
      if (lane % LANES == 0) extremes[(unit * GROUP + g) * 2] = result.peak[g], extremes[(unit * GROUP + g) * 2 + 1] = result.mass[g];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP * SIZE; i += THREADS) {
      int g = i / SIZE, d = i % SIZE, query_head = head * GROUP + g;
      float peak = LOWEST, mass = 0, total = 0;
      UNROLL for (int n = 0; n < UNITS; n++) peak = max(peak, extremes[(n * GROUP + g) * 2]);
      UNROLL for (int n = 0; n < UNITS; n++) {
        float grow = exp2_fast(extremes[(n * GROUP + g) * 2] - peak);
        mass += grow * extremes[(n * GROUP + g) * 2 + 1];
        total += grow * values[(n * GROUP + g) * SIZE + d];
      }
      if (own_parts == 1) {
        finish(a, token, query_head, d, peak, mass, total);
      } else {
        u64 at = ((u64)token * (HEADS * GROUP) + query_head) * a.parts + part;
        a.partial[at * SIZE + d] = total;
        if (d == 0) a.extremes[at * 2] = peak, a.extremes[at * 2 + 1] = mass;
      }
    }
    __syncthreads();
  }
  if (own_parts == 1) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    u32* arrived = a.arrived + token * HEADS + head;
    *last = atomicAdd(arrived, 1) == (u32)min(own_parts, a.programs) - 1;
    if (*last) *arrived = 0;
  }
  __syncthreads();
  if (!*last) return;
  __threadfence();
  for (int i = threadIdx.x; i < GROUP * SIZE; i += THREADS) {
    int d = i % SIZE, query_head = head * GROUP + i / SIZE;
    u64 at = ((u64)token * (HEADS * GROUP) + query_head) * a.parts + first_part;
    float peak = LOWEST, mass = 0, total = 0;
    _Pragma("unroll 8") for (int n = 0; n < own_parts; n++) peak = max(peak, load_sum(a.extremes + (at + n) * 2));
    _Pragma("unroll 8") for (int n = 0; n < own_parts; n++) {
      float grow = exp2_fast(load_sum(a.extremes + (at + n) * 2) - peak);
      mass += grow * load_sum(a.extremes + (at + n) * 2 + 1);
      total += grow * load_sum(a.partial + (at + n) * SIZE + d);
    }
    finish(a, token, query_head, d, peak, mass, total);
  }
}
