// What the kernels of decode attention share: tiles of 16 keys in the matrix unit, and sums over keys that meet. Included
// as text, behind common.cuh; SIZE, GROUP and WARPS are defined by then.
//
// The matrix unit multiplies keys [16 keys x 16 columns] by queries [16 columns x 8 heads], and values [16 columns x 16 keys]
// by weights [16 keys x 8 heads]. What a warp copies comes in units of 16 rows of up to 128 columns.

DI float exp2_fast(float v) { float r; asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(v)); return r; }
// For what a launch that overlaps with this one, or another block, wrote.
DI int load_int(const int* p) {
  int v;
  asm volatile("ld.global.cg.s32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DI void copy_rows(u32 to, u64 from) { asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to), "l"(from) : "memory"); }
// Four matrices of 8 rows of 16 bytes, whose addresses the lanes give: as operands of the matrix unit, by rows or by columns.
DI void load_rows(u32* r, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
DI void load_columns(u32* r, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
DI u32 transposed(u32 v) { u32 r; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(r) : "r"(v)); return r; }

constexpr int TILE = 16, COLS = SIZE < 128 ? SIZE : 128, SEGMENTS = SIZE / COLS, CHUNKS = COLS / 8;
constexpr int UNIT = TILE * COLS * 2, STEPS = COLS / 16, VALUE_ROW = SIZE + 4;   // bytes; of 16 columns; floats, in other banks
constexpr float LOG2E = 1.4426950408889634f, LOWEST = -1.0e30f, ABSENT = -3.0e38f;

DI float shuffled(float v, int lane) { return __uint_as_float(__shfl_sync(~0u, __float_as_uint(v), lane)); }
DI u32 pair(float low, float high) { return (u32)to_half(low) | (u32)to_half(high) << 16; }
DI float capped(float score, float most) { return most * (2.0f / (1.0f + exp2_fast(-2.0f * LOG2E * (score / most))) - 1.0f); }   // most * tanh
// Where 16 bytes of a row lie: rows below each other are in different banks.
DI u32 place(int row, int chunk, int chunks) { return (row * chunks + (chunk ^ (row & 7))) * 16; }

// Queries of a group, from [GROUP, SIZE] in shared memory.
struct Queries {
  u32 words[SIZE / 8];
  DI Queries(u32 at, int lane) {
    UNROLL for (int i = 0; i < SIZE / 32; i++)
      load_rows(words + 4 * i, at + place(min(lane % 8, GROUP - 1), 4 * i + lane / 8, SIZE / 8));
    UNROLL for (int i = 0; i < SIZE / 8; i++) words[i] = lane / 4 < GROUP ? words[i] : 0;
  }
};

// What a warp has of the keys that it saw; a lane has heads 2 * (lane % 4) and the next.
struct Sums {
  float values[SIZE / 16][4], peak[2], mass[2];                 // [16 columns x 8 heads]; maximum (base 2) and sum of weights
  DI Sums() : peak{LOWEST, LOWEST}, mass{0, 0} {
    UNROLL for (int i = 0; i < SIZE / 16; i++) UNROLL for (int j = 0; j < 4; j++) values[i][j] = 0;
  }
  // One unit of keys; scores are [16 keys x 8 heads]: two sums, which do not wait for each other.
  DI static void score(float (*scores)[4], const Queries& queries, u32 unit, int segment, int lane) {
    UNROLL for (int c = 0; c < STEPS; c++) {
      u32 k[4];
      load_rows(k, unit + place(lane % 16, 2 * c + lane / 16, CHUNKS));
      multiply(scores[c & 1], k, queries.words[2 * (segment * STEPS + c)], queries.words[2 * (segment * STEPS + c) + 1]);
    }
  }
  // Scores of a tile (base 2), of keys lane / 4 and 8 further on, become weights, operands for the values.
  DI void weigh(float* weight, u32& low, u32& high, int lane) {
    float shrink[2];
    UNROLL for (int h = 0; h < 2; h++) {
      float higher = max(weight[h], weight[2 + h]);
      UNROLL for (int step = 4; step < 32; step *= 2) higher = max(higher, shuffled(higher, lane ^ step));
      higher = max(higher, peak[h]);
      shrink[h] = exp2_fast(peak[h] - higher), peak[h] = higher;
      UNROLL for (int i = h; i < 4; i += 2) weight[i] = exp2_fast(weight[i] - higher);
      mass[h] = mass[h] * shrink[h] + weight[h] + weight[2 + h];
    }
    if (__ballot_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f))
      UNROLL for (int i = 0; i < SIZE / 16; i++) UNROLL for (int j = 0; j < 4; j++) values[i][j] *= shrink[j & 1];
    low = transposed(pair(weight[0], weight[1])), high = transposed(pair(weight[2], weight[3]));
  }
  // One unit of values.
  DI void add(u32 unit, int segment, u32 low, u32 high, int lane) {
    UNROLL for (int c = 0; c < STEPS; c++) {
      u32 v[4];
      load_columns(v, unit + place(lane % 8 + lane / 16 * 8, 2 * c + lane / 8 % 2, CHUNKS));
      multiply(values[segment * STEPS + c], v, low, high);
    }
  }
  // To [GROUP, VALUE_ROW] in shared memory, and maximum and sum of weights to [GROUP, step].
  DI void leave(float* to, float* extremes, int step, int lane) {
    UNROLL for (int h = 0; h < 2; h++) {
      UNROLL for (int across = 4; across < 32; across *= 2) mass[h] += shuffled(mass[h], lane ^ across);
      int g = lane % 4 * 2 + h;
      if (g < GROUP) {
        float* row = to + g * VALUE_ROW + lane / 4;
        UNROLL for (int i = 0; i < SIZE / 16; i++) row[16 * i] = values[i][h], row[16 * i + 8] = values[i][2 + h];
        if (lane < 4) extremes[g * step] = peak[h], extremes[g * step + 1] = mass[h];
      }
    }
  }
};

// What some part of the keys gives one lane: four columns of a query head, still to be divided by the sum of weights.
struct Result {
  float peak, mass;
  float4 sum;
  DI Result() : peak(LOWEST), mass(0), sum{0, 0, 0, 0} {}
  DI void add(float other_peak, float other_mass, float4 other) {
    float higher = max(peak, other_peak), shrink = exp2_fast(peak - higher), grow = exp2_fast(other_peak - higher);
    auto mixed = [&](float mine, float of_other) { return fmaf(of_other, grow, mine * shrink); };   // in all callers alike
    peak = higher, mass = mixed(mass, other_mass);
    sum = {mixed(sum.x, other.x), mixed(sum.y, other.y), mixed(sum.z, other.z), mixed(sum.w, other.w)};
  }
  DI uint2 halves() const { return {pair(sum.x / mass, sum.y / mass), pair(sum.z / mass, sum.w / mass)}; }
};
