// The rows of a unit of work against one tile of keys: scores, weights, and the running sum of values.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace pallas_kernels {

constexpr int kTileKeys = 64;
constexpr int64_t kPartKeys = 1024;
constexpr float kMasked = -1e30f;

struct Shapes {
  int64_t num_heads, num_kv_heads, key_dim, value_dim, value_stride, num_blocks, block_size, table_width, window;
  float scale, soft_cap;  // soft_cap 0: none
};

template <typename T>
struct Pools {
  const T* keys;
  const T* values;
  const float* key_scales;  // null but for int8
  const float* value_scales;
};

// A tile of a row's queries, and some of the query heads that share a KV head; first_head counts among all query heads.
struct Unit {
  int32_t row, kv_head, first_query, num_queries, first_head, num_heads;
};

struct Queries {
  const float* q;
  const float* sinks;  // null: none
  float* out;
  const int32_t* table;
  int64_t query_start, num_keys_before;

  int64_t first_end(const Unit& unit) const { return num_keys_before + unit.first_query + 1; }
  int64_t first_key(const Shapes& s, const Unit& unit) const { return std::max<int64_t>(0, first_end(unit) - s.window); }
  int64_t first_part(const Shapes& s, const Unit& unit) const { return first_key(s, unit) / kPartKeys; }
  int64_t num_parts(const Shapes& s, const Unit& unit) const {
    return (first_end(unit) + unit.num_queries - 2) / kPartKeys + 1 - first_part(s, unit);
  }
};

// Where a row of the unit stands among all tokens and query heads.
inline int64_t PlaceOf(const Shapes& s, const Unit& unit, const Queries& queries, int64_t row) {
  return (queries.query_start + unit.first_query + row / unit.num_heads) * s.num_heads + unit.first_head + row % unit.num_heads;
}

// Where the keys and values of a tile lie: key `start` first, of which begin..end - 1 are there.
template <typename T>
struct Tile {
  int64_t start, begin, end;
  bool has_scales;
  const T* keys[kTileKeys];
  const T* values[kTileKeys];
  float key_scales[kTileKeys], value_scales[kTileKeys];
};

// The query heads of a unit while keys pass by.
struct Progress {
  std::vector<Vec> weighted;
  std::vector<float> highest, total;
};

// How many rows share each load of a key and of a value: as many as the registers hold. It changes no bit of any of them.
constexpr int MaxRows(int num_vecs) { return num_vecs == 0 ? 1 : num_vecs <= 2 ? 4 : num_vecs <= 4 ? 3 : num_vecs <= 8 ? 2 : 1; }

// kVecs: key and value dim in vectors, or 0: they are known at run time only. The rows are query heads of one query.
// Four keys share each load of the queries and the tree of the sum; the last four repeat their last key, so that every key goes
// the same way. Sums start from zero: of a sum of two products the compiler may fuse either one, which gives other bits.
template <typename T, int kVecs, int kRows>
inline void Dots(const Shapes& s, const float* query, const T* const* keys, int64_t begin, int64_t end, float (*scores)[kTileKeys]) {
  const int64_t num_vecs = kVecs > 0 ? kVecs : s.key_dim / kLanes;
  Vec known[kRows][std::max(kVecs, 1)];  // in registers, which the compiler cannot know to be safe while scores are stored
  for (int r = 0; r < kRows; ++r)
    for (int i = 0; i < kVecs; ++i) known[r][i] = Load(query + r * s.key_dim + i * kLanes);
  for (int64_t key = begin; key < end; key += 4) {
    Vec sums[kRows][4] = {};
    const T* at[4];
    for (int j = 0; j < 4; ++j) at[j] = keys[std::min(key + j, end - 1)];
    for (int64_t i = 0; i < num_vecs; ++i) {
      for (int j = 0; j < 4; ++j) {
        const Vec key_vec = Load(at[j] + i * kLanes);
        for (int r = 0; r < kRows; ++r) sums[r][j] += (kVecs > 0 ? known[r][i] : Load(query + r * s.key_dim + i * kLanes)) * key_vec;
      }
    }
    for (int r = 0; r < kRows; ++r) {
      const Vec4 four = Sums(sums[r]) * s.scale;
      if (key + 4 <= end)
        std::memcpy(scores[r] + key, &four, sizeof four);
      else
        for (int j = 0; j < end - key; ++j) scores[r][key + j] = four[j];
    }
  }
}

// weighted = weighted * keep + the sum of weights[key] * values[key], over kVecs vectors of each row.
template <typename T, int kVecs, int kRows>
inline void AddValues(const T* const* values, int64_t first, const float (*weights)[kTileKeys], int64_t begin, int64_t end, const float* keep,
                      Vec* weighted) {
  Vec sums[kRows][kVecs];
  for (int r = 0; r < kRows; ++r)
    for (int i = 0; i < kVecs; ++i) sums[r][i] = weighted[r * kVecs + i] * keep[r];
  for (int64_t key = begin; key < end; ++key)
    for (int i = 0; i < kVecs; ++i) {
      const Vec value = Load(values[key] + first + i * kLanes);
      for (int r = 0; r < kRows; ++r) sums[r][i] += weights[r][key] * value;
    }
  for (int r = 0; r < kRows; ++r)
    for (int i = 0; i < kVecs; ++i) weighted[r * kVecs + i] = sums[r][i];
}

template <typename T>
inline void AddValuesOfAnyDim(int64_t dim, const T* const* values, const float (*weights)[kTileKeys], int64_t begin, int64_t end,
                              const float* keep, Vec* weighted) {
  int64_t first = 0;
  for (; first + 8 * kLanes <= dim; first += 8 * kLanes)
    AddValues<T, 8, 1>(values, first, weights, begin, end, keep, weighted + first / kLanes);
  for (; first < dim; first += kLanes) AddValues<T, 1, 1>(values, first, weights, begin, end, keep, weighted + first / kLanes);
}

// Scores outside begin..end - 1 are capped too, and masked again.
inline void CapScores(float cap, int64_t begin, int64_t end, float* scores) {
  for (int i = 0; i < kTileKeys; i += kLanes) Store(scores + i, cap * Tanh(Load(scores + i) / cap));
  for (int64_t i = 0; i < begin; ++i) scores[i] = kMasked;
  for (int64_t i = end; i < kTileKeys; ++i) scores[i] = kMasked;
}

// Turns each row's scores into weights in place, moves the running maxima and sums, and gives what the sums so far were multiplied by.
template <int kRows>
inline void Weigh(float (*scores)[kTileKeys], float* highest, float* total, float* keep) {
  Vec moved = Vec{};  // all rows' factors in one exponential
  for (int r = 0; r < kRows; ++r) {
    Vec top = Load(scores[r]);
    for (int i = kLanes; i < kTileKeys; i += kLanes) {
      Vec next = Load(scores[r] + i);
      top = top > next ? top : next;
    }
    const float new_highest = std::max(highest[r], Max(top));
    moved[r] = highest[r] - new_highest;
    highest[r] = new_highest;
  }
  moved = Exp(moved);
  for (int r = 0; r < kRows; ++r) {
    Vec tile_total = Vec{};
    for (int i = 0; i < kTileKeys; i += kLanes) {
      Vec weight = Exp(Load(scores[r] + i) - highest[r]);
      tile_total += weight;
      Store(scores[r] + i, weight);
    }
    keep[r] = moved[r];
    total[r] = total[r] * keep[r] + Sum(tile_total);
  }
}

// Some query heads of one query against the keys begin..end - 1 of a tile; `row` is the first of them.
template <typename T, int kVecs, int kRows>
inline void AttendRows(const Shapes& s, const float* query, const Tile<T>& tile, int64_t row, int64_t begin, int64_t end, Progress& progress) {
  alignas(64) float scores[kRows][kTileKeys];
  float keep[kRows];
  for (int i = 0; i < kRows * kTileKeys; ++i) scores[0][i] = kMasked;
  Dots<T, kVecs, kRows>(s, query, tile.keys, begin, end, scores);
  for (int r = 0; r < kRows; ++r) {
    if (tile.has_scales)
      for (int64_t key = begin; key < end; ++key) scores[r][key] *= tile.key_scales[key];
    if (s.soft_cap > 0) CapScores(s.soft_cap, begin, end, scores[r]);
  }
  Weigh<kRows>(scores, &progress.highest[row], &progress.total[row], keep);
  if (tile.has_scales)
    for (int r = 0; r < kRows; ++r)
      for (int64_t key = begin; key < end; ++key) scores[r][key] *= tile.value_scales[key];
  if constexpr (kVecs > 0)
    AddValues<T, kVecs, kRows>(tile.values, 0, scores, begin, end, keep, &progress.weighted[row * kVecs]);
  else
    AddValuesOfAnyDim<T>(s.value_dim, tile.values, scores, begin, end, keep, &progress.weighted[row * (s.value_dim / kLanes)]);
}

// Every row of a unit against a tile of keys: the heads of each query in as few and as equal runs as the registers allow.
template <typename T, int kVecs>
void AttendTile(const Shapes& s, const Unit& unit, const Queries& queries, const Tile<T>& tile, Progress& progress) {
  constexpr int kMaxRows = MaxRows(kVecs);
  const int64_t first_end = queries.first_end(unit), num_runs = (unit.num_heads + kMaxRows - 1) / kMaxRows;
  for (int64_t query = 0; query < unit.num_queries; ++query) {
    const int64_t row_end = first_end + query - tile.start;
    const int64_t begin = std::max<int64_t>(0, row_end - s.window), end = std::min(row_end, tile.end);
    if (begin >= end) continue;
    for (int64_t run = 0; run < num_runs; ++run) {
      const int64_t head = unit.num_heads * run / num_runs, count = unit.num_heads * (run + 1) / num_runs - head;
      const int64_t row = query * unit.num_heads + head;
      const float* at = queries.q + PlaceOf(s, unit, queries, row) * s.key_dim;
      if (count == 1) AttendRows<T, kVecs, 1>(s, at, tile, row, begin, end, progress);
      if constexpr (kMaxRows >= 2)
        if (count == 2) AttendRows<T, kVecs, 2>(s, at, tile, row, begin, end, progress);
      if constexpr (kMaxRows >= 3)
        if (count == 3) AttendRows<T, kVecs, 3>(s, at, tile, row, begin, end, progress);
      if constexpr (kMaxRows >= 4)
        if (count == 4) AttendRows<T, kVecs, 4>(s, at, tile, row, begin, end, progress);
    }
  }
}

template <typename T>
inline void FindTile(const Shapes& s, const Pools<T>& pools, const int32_t* table, int64_t kv_head, int64_t start, int64_t begin, int64_t end,
                     Tile<T>& tile) {
  tile.start = start;
  tile.begin = begin - start;
  tile.end = end - start;
  tile.has_scales = pools.key_scales != nullptr;
  for (int64_t key = begin; key < end; ++key) {
    const int64_t slot = (kv_head * s.num_blocks + table[key / s.block_size]) * s.block_size + key % s.block_size;
    tile.keys[key - start] = pools.keys + slot * s.key_dim;
    tile.values[key - start] = pools.values + slot * s.value_stride;
    if constexpr (std::is_same_v<T, int8_t>) {
      tile.key_scales[key - start] = pools.key_scales[slot];
      tile.value_scales[key - start] = pools.value_scales[slot];
    }
  }
}

// The same tile as floats, which is exact. Latent values are a part of their keys and follow them.
template <typename T>
inline void WidenTile(const Shapes& s, const Tile<T>& tile, bool is_latent, float* room, Tile<float>& wide) {
  wide.start = tile.start;
  wide.begin = tile.begin;
  wide.end = tile.end;
  wide.has_scales = tile.has_scales;
  for (int64_t key = tile.begin; key < tile.end; ++key) {
    if constexpr (std::is_same_v<T, int8_t>) {
      wide.key_scales[key] = tile.key_scales[key];
      wide.value_scales[key] = tile.value_scales[key];
    }
    wide.keys[key] = wide.values[key] = room;
    for (int64_t i = 0; i < s.key_dim; i += kLanes) Store(room + i, Load(tile.keys[key] + i));
    room += s.key_dim;
    if (is_latent) continue;
    wide.values[key] = room;
    for (int64_t i = 0; i < s.value_dim; i += kLanes) Store(room + i, Load(tile.values[key] + i));
    room += s.value_dim;
  }
}

}  // namespace pallas_kernels
