// What peer_sums.cu needs beyond cuda_on_cpu.h. Blocks run in turn: what others write must be there, or they be given up.

#include "cuda_on_cpu.h"

inline void store_line(u64* p, u64 line) { *p = line; }
inline u64 load_line(const u64* p) { return *p; }
inline u32 load_flag(const u32* p) { return *p; }
