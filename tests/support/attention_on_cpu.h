// What attention.cu needs beyond products_on_cpu.h.

#include "products_on_cpu.h"

inline int __clz(u32 value) { return value ? __builtin_clz(value) : 32; }
inline float exp2_fast(float v) { return std::exp2(v); }
inline int load_int(const int* p) { return at<int>((u64)p); }
inline float load_sum(const float* p) { return at<float>((u64)p); }
