// The sum over the ranks of a replica, on GPUs that write to each other's memory: one launch, no barrier (cuda_peers.py).
//
//   RANKS, RANK (this one), THREADS of a block; WIDE, 1: numbers of 32 bits; 0: of 16, FLOAT16 as in common.cuh
//
// A word is 16 bytes of a tensor; a thread has one. It writes its rank's word to the inboxes of all others, as four lines of
// 8 bytes, 4 of data and the number of the call, and reads its own inbox until the lines of all others have that number. A
// line is written and read whole, so neither fence nor barrier is needed. Parts are added in the order of the ranks: the same
// bits result on each.
//
// An inbox has two places, taken in turn. Who makes call n + 2 has seen lines of the same block of call n + 1 of all others,
// which are written when their call n has ended: nobody reads what is written over. Calls are counted for each block, as
// tensors differ in size; the same on all ranks, whose calls are alike.

#include "common.cuh"

constexpr int PARTS = 4;                  // lines of a word

struct Arguments {
  const uint4* own;                       // [count] this rank's part
  const uint4* add;                       // [count] added to the sum; or null
  uint4* out;                             // [count], may be `own` or `add`
  u64* inboxes[RANKS];                    // by rank: [2 places, RANKS senders, PARTS, capacity]
  u32* turns;                             // [blocks] calls so far
  const u32* given_up;                    // [1] not 0: wait for nobody, whatever results
  int count, capacity;                    // words
};

DI void store_line(u64* p, u64 line) { asm volatile("st.relaxed.sys.global.u64 [%0],%1;" :: "l"(p), "l"(line) : "memory"); }
DI u64 load_line(const u64* p) {
  u64 line;
  asm volatile("ld.relaxed.sys.global.u64 %0,[%1];" : "=l"(line) : "l"(p) : "memory");
  return line;
}
DI u32 load_flag(const u32* p) {
  u32 flag;
  asm volatile("ld.relaxed.sys.global.u32 %0,[%1];" : "=r"(flag) : "l"(p) : "memory");
  return flag;
}

// The numbers of a word, added up in fp32.
struct Numbers {
  float sums[WIDE ? 4 : 8];
  DI void add(const u32* word) {
    UNROLL for (int i = 0; i < PARTS; i++) {
      if (WIDE) sums[i] += __uint_as_float(word[i]);
      else { sums[2 * i] += from_half((u16)word[i]); sums[2 * i + 1] += from_half((u16)(word[i] >> 16)); }
    }
  }
  DI u32 part(int i) const {
    return WIDE ? __float_as_uint(sums[i]) : to_half(sums[2 * i]) | (u32)to_half(sums[2 * i + 1]) << 16;
  }
};

DI u64* place_of(const Arguments& a, int owner, int sender, u32 turn, int word) {
  return a.inboxes[owner] + (u64)((turn & 1) * RANKS + sender) * PARTS * a.capacity + word;
}

DI void sum_word(const Arguments& a, u32 turn, int word) {
  uint4 mine = a.own[word];
  u32 words[RANKS][PARTS];
  words[RANK][0] = mine.x; words[RANK][1] = mine.y; words[RANK][2] = mine.z; words[RANK][3] = mine.w;
  UNROLL for (int rank = 0; rank < RANKS; rank++) {
    if (rank == RANK) continue;
    u64* to = place_of(a, rank, RANK, turn, word);
    UNROLL for (int i = 0; i < PARTS; i++) store_line(to + (u64)i * a.capacity, (u64)turn << 32 | words[RANK][i]);
  }
  bool all;
  u32 tries = 0;
  do {
    all = true;
    UNROLL for (int rank = 0; rank < RANKS; rank++) {
      if (rank == RANK) continue;
      const u64* from = place_of(a, RANK, rank, turn, word);
      UNROLL for (int i = 0; i < PARTS; i++) {
        u64 line = load_line(from + (u64)i * a.capacity);
        words[rank][i] = (u32)line;
        all &= (u32)(line >> 32) == turn;
      }
    }
  } while (!all && !(!(++tries & 255) && load_flag(a.given_up)));
  Numbers total = {};
  UNROLL for (int rank = 0; rank < RANKS; rank++) total.add(words[rank]);
  if (a.add) {
    uint4 more = a.add[word];
    u32 parts[PARTS] = {more.x, more.y, more.z, more.w};
    total.add(parts);
  }
  uint4 result = {total.part(0), total.part(1), total.part(2), total.part(3)};
  a.out[word] = result;
}

extern "C" __global__ void __launch_bounds__(THREADS) peer_sum(Arguments a) {
  int word = blockIdx.x * THREADS + threadIdx.x;
  let_next_begin();
  wait_for_earlier();
  u32 turn = a.turns[blockIdx.x] + 1;
  if (word < a.count) sum_word(a, turn, word);
  __syncthreads();
  if (!threadIdx.x) a.turns[blockIdx.x] = turn;
}
