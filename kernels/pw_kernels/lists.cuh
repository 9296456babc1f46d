// Which tokens an expert has: the slots of each expert in groups, work lists for both modules by class of width, those of a
// width in no order, and routing statistics in fixed point, so that they do not depend on the order of the threads. By one block.
//
//   EXPERTS, TOP_K, TOKENS (slots of a group);  LISTS, 0: nobody makes lists, and none of this is there

#if defined(LISTS) && !LISTS
struct Routing { char nothing; };
#else
struct Routing {
  const long long* ids;   // [S] experts; outside [0, EXPERTS): no expert
  const float* weights;   // [S]
  const int* bits[2];     // [EXPERTS] widths of gate_up and down
  const int* offsets[2];  // [EXPERTS] bytes of their tables in their regions
  int4* work[2];          // [2 classes, G]: group, expert or -1, width, offset; the widest first, because they take longest
  int* slots;             // [G, TOKENS], S for an unused place
  int* ranks;             // [S] scratch
  int* counts;            // [EXPERTS] slots of each expert; or null
  float* statistics;      // [2, EXPERTS] sums of weights and squares, added to; or null
  const int* live;        // [1] tokens that are real, the others have no expert; or null: all are
  int* progress;          // [progress_count] counters of the launches behind, set to zero
  int slot_count, groups; // S, G
  int threshold;          // widest width of class 0
  int progress_count;
  int least[2], most[2];  // widths that the launches behind take; any other would leave them waiting, so the call is broken off
};

// In shared memory.
struct Tally {
  u32 counts[EXPERTS];
  int first[EXPERTS];                                           // group
  u64 mass[EXPERTS], square[EXPERTS];
  int listed[2][9], all;                                        // groups of each module and width
};

// Of an expert, a thread each.
struct Block {
  int width[2] = {0, 0}, offset[2] = {0, 0};
  DI void read(const Routing& a, int e) {
    UNROLL for (int m = 0; m < 2; m++)
      if (e < EXPERTS) width[m] = min(max(a.bits[m][e], 0), 8), offset[m] = a.offsets[m][e];
  }
};

// Empty lists; to be followed by a barrier, as each of these.
template <int BY> DI void clear_lists(const Routing& a, Tally& t, int thread) {
  ROLLED for (int i = thread; i < EXPERTS; i += BY) t.counts[i] = 0, t.mass[i] = 0, t.square[i] = 0;
  ROLLED for (int i = thread; i < 2 * 9; i += BY) t.listed[i / 9][i % 9] = 0;
  if (thread == 0) t.all = 0;
  ROLLED for (int i = thread; i < a.groups * TOKENS; i += BY) a.slots[i] = a.slot_count;
  ROLLED for (int i = thread; i < a.progress_count; i += BY) a.progress[i] = 0;
  UNROLL for (int m = 0; m < 2; m++)
    ROLLED for (int i = thread; i < 2 * a.groups; i += BY) a.work[m][i] = make_int4(0, -1, 0, 0);
}
// The slot's rank among those of its expert.
DI int count_slot(const Routing& a, Tally& t, int expert, double weight) {
  if (a.statistics) {
    atomicAdd(&t.mass[expert], (u64)__double2ll_rn(weight * 4294967296.0));
    atomicAdd(&t.square[expert], (u64)__double2ll_rn(weight * weight * 4294967296.0));
  }
  return (int)atomicAdd(&t.counts[expert], 1);
}
// The expert of a thread: where its groups begin; all slots are counted.
DI int place_groups(const Routing& a, Tally& t, int e, const Block& block, int* place) {
  if (e >= EXPERTS) return 0;
  int mine = (t.counts[e] + TOKENS - 1) / TOKENS;
  if (a.counts) a.counts[e] = t.counts[e];
  if (mine) {
    t.first[e] = atomicAdd(&t.all, mine);
    UNROLL for (int m = 0; m < 2; m++) place[m] = atomicAdd(&t.listed[m][block.width[m]], mine);
  }
  return mine;
}
// Its entries in both lists; all groups have their place.
DI void list_groups(const Routing& a, const Tally& t, int e, const Block& block, int mine, const int* place) {
  if (!mine) return;
  UNROLL for (int m = 0; m < 2; m++) {
    int width = block.width[m], high = width > a.threshold, at = place[m];
    if (width < a.least[m] || width > a.most[m]) __trap();
    ROLLED for (int b = high ? 8 : min(a.threshold, 8); b > width; b--) at += t.listed[m][b];
    int4* list = a.work[m] + high * a.groups + at;
    ROLLED for (int i = 0; i < mine; i++) list[i] = make_int4(t.first[e] + i, e, width, block.offset[m]);
  }
}
// Its statistics: last, as they have to be read.
DI void add_statistics(const Routing& a, const Tally& t, int e) {
  if (!a.statistics || e >= EXPERTS || !t.counts[e]) return;
  a.statistics[e] += (float)((double)(long long)t.mass[e] / 4294967296.0);
  a.statistics[EXPERTS + e] += (float)((double)(long long)t.square[e] / 4294967296.0);
}
// All of it for slots whose experts are there, and in range; `ranks` [count] is room.
template <int BY> DI void make_lists(const Routing& a, Tally& t, int thread, const Block& block, int count, const int* experts, const float* weights, int* ranks) {
  int place[2];
  ROLLED for (int s = thread; s < count; s += BY) ranks[s] = count_slot(a, t, experts[s], weights[s]);
  __syncthreads();
  int groups = place_groups(a, t, thread, block, place);
  __syncthreads();
  list_groups(a, t, thread, block, groups, place);
  ROLLED for (int s = thread; s < count; s += BY) a.slots[t.first[experts[s]] * TOKENS + ranks[s]] = s;
  add_statistics(a, t, thread);
}
#endif
