// How products and the router norm the rows that they multiply: two numbers of 16 bits in a word.

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
