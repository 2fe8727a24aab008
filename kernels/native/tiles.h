// The tile unit of AMX: eight registers of 16 rows of 64 bytes, and products of pairs of bf16 that are added up in fp32.
//
// A library for processors with AVX-512 bf16 holds this code, too, and `tiles::fault` says whether the processor at hand
// and its operating system support them. With -DHEADWISE_EMULATE_TILES the instructions are emulated, bit by bit, for
// tests on processors that have none: CXX="c++ -DHEADWISE_EMULATE_TILES".
#pragma once

#include <string>

#include "vectors.h"

#if defined(__AVX512BF16__) && defined(__linux__) && defined(__x86_64__)
#if defined(HEADWISE_EMULATE_TILES) || __has_include(<amxtileintrin.h>)
#define HEADWISE_TILES
#endif
#endif

#if defined(HEADWISE_TILES) && !defined(HEADWISE_EMULATE_TILES)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#endif

namespace headwise::tiles {

#if !defined(HEADWISE_TILES)

inline const std::string& fault() {
  static const std::string none = "this build has no code for tiles";
  return none;
}

#elif defined(HEADWISE_EMULATE_TILES)

#define HEADWISE_USES_TILES

struct Unit {
  bool configured = false;
  alignas(64) uint8_t tiles[8][16][64];
};
inline thread_local Unit unit;

inline const std::string& fault() {
  static const std::string none;
  return none;
}

inline void configure() {
  TORCH_CHECK(!unit.configured, "tiles were not released");
  unit.configured = true;
  std::memset(unit.tiles, 0, sizeof unit.tiles);
}

inline void release() { unit.configured = false; }

template <int TILE>
void zero() {
  TORCH_CHECK(unit.configured, "tiles are not configured");
  std::memset(unit.tiles[TILE], 0, sizeof unit.tiles[TILE]);
}

template <int TILE>
void load(const void* from, int64_t stride) {
  TORCH_CHECK(unit.configured, "tiles are not configured");
  for (int row = 0; row < 16; ++row) std::memcpy(unit.tiles[TILE][row], static_cast<const char*>(from) + row * stride, 64);
}

template <int TILE>
void store(void* to, int64_t stride) {
  for (int row = 0; row < 16; ++row) std::memcpy(static_cast<char*>(to) + row * stride, unit.tiles[TILE][row], 64);
}

// TDPBF16PS as Intel's manual has it: the first and the second of each pair are added up apart, each by a fused
// multiply-add from zero on, then to each other, then to the accumulator. Rounding is to nearest even.
[[gnu::noinline]] inline void multiply(float (*c)[16], const uint32_t (*a)[16], const uint32_t (*b)[16]) {
  const __m512i high = _mm512_set1_epi32(0xffff0000);
  for (int row = 0; row < 16; ++row) {
    __m512 first = _mm512_setzero_ps();
    __m512 second = _mm512_setzero_ps();
    for (int pair = 0; pair < 16; ++pair) {
      const __m512i x = _mm512_set1_epi32(a[row][pair]);
      const __m512i y = _mm512_loadu_si512(b[pair]);
      first = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(x, 16), (__m512)_mm512_slli_epi32(y, 16), first);
      second = _mm512_fmadd_ps((__m512)_mm512_and_si512(x, high), (__m512)_mm512_and_si512(y, high), second);
    }
    _mm512_storeu_ps(c[row], _mm512_add_ps(_mm512_loadu_ps(c[row]), _mm512_add_ps(first, second)));
  }
}

template <int C, int A, int B>
void add_product() {
  const unsigned before = _mm_getcsr();
  // Subnormal numbers are zeros, read and written.
  _mm_setcsr(0x9fc0);
  multiply(reinterpret_cast<float(*)[16]>(unit.tiles[C]), reinterpret_cast<const uint32_t(*)[16]>(unit.tiles[A]),
           reinterpret_cast<const uint32_t(*)[16]>(unit.tiles[B]));
  _mm_setcsr(before);
}

#else

// Instructions are written out: GCC's intrinsics take literal numbers of tiles only, and do not say that a load reads memory.
#define HEADWISE_USES_TILES __attribute__((target("amx-tile,amx-bf16")))
#define HEADWISE_TILE_OP template <int T> [[gnu::always_inline]] HEADWISE_USES_TILES inline void

struct alignas(64) Configuration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_of_a_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(Configuration) == 64);

HEADWISE_USES_TILES inline void configure() {
  static constexpr Configuration whole;
  asm volatile("ldtilecfg %0" ::"m"(whole) : "memory");
}

HEADWISE_USES_TILES inline void release() { asm volatile("tilerelease" ::: "memory"); }

HEADWISE_TILE_OP zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }

HEADWISE_TILE_OP load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}

HEADWISE_TILE_OP store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}

// C += A B: 16 x 32 bf16 of A by 32 x 16 of B, whose rows are pairs.
template <int C, int A, int B>
[[gnu::always_inline]] HEADWISE_USES_TILES inline void add_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
#undef HEADWISE_TILE_OP

// Asks Linux for the use of tiles, which it grants to a process as a whole; returns why there are none.
inline std::string find_fault() {
  unsigned a, b, c, d;
  constexpr unsigned bf16 = 1u << 22, tile = 1u << 24, osxsave = 1u << 27;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (bf16 | tile)) != (bf16 | tile))
    return "the processor has no AMX, or a hypervisor hides it";
  // The bits of XCR0 for the configuration and for the data of tiles.
  constexpr unsigned saved = 3u << 17;
  __cpuid(1, a, b, c, d);
  if (!(c & osxsave)) return "the operating system does not save tiles";
  asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  if ((a & saved) != saved) return "the operating system does not save tiles";
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA))
    return std::string("Linux refuses tiles: ") + std::strerror(errno);
  return "";
}

// Why tiles cannot be used; empty where they can.
inline const std::string& fault() {
  static const std::string found = find_fault();
  return found;
}

#endif

}  // namespace headwise::tiles
