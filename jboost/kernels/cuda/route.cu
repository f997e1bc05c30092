// SPDX-License-Identifier: Apache-2.0
// Where the splits of a level send the rows; see ../../trees/levels.py.
//
// A row's slot says which node of the level it is in; rows in nodes that have stopped
// growing have a slot of `slots` or more.
#include "prelude.h"

// The split of each slot.
struct Splits {
  const int *feature, *threshold;
  const u8* missing_left;
  const u32* left_codes;  // [slot][word]: where the threshold is -1, bits of codes
  int words;

  __device__ bool sends_right(int slot, int code) const {
    if (code == 0) return missing_left[slot] == 0;
    if (threshold[slot] >= 0) return code > threshold[slot];
    return (left_codes[(i64)slot * words + code / 32] >> (code % 32) & 1) == 0;
  }
};

// What a level's nodes send to the next level.
struct Nodes {
  Splits splits;
  const int* pair;         // number of the slot among those that are split
  const u8* left_smaller;  // whether the left child has fewer rows than the right one
};

// Where the rows are, on the level above and on the next one.
struct Places {
  const u8* in_bag;
  const int *slot_before, *position_before;
  int *node, *slot, *position;
};

// Sends rows down. The children of pair r have the slots 2 r and 2 r + 1 of
// `next_slots`. `node` is r for rows in the bag that go to the smaller child.
template <class Code>
__device__ __forceinline__ void route(const Code* codes, const Nodes& nodes,
                                      const Places& places, i64 rows, int slots,
                                      int next_slots) {
  const Splits& splits = nodes.splits;
  const i64 first = 4 * ((i64)blockIdx.x * blockDim.x + threadIdx.x);
  const i64 step = 4 * (i64)gridDim.x * blockDim.x;
  for (i64 row = first; row < rows; row += step) {
    const int count = (int)least(4, rows - row);
    int slot[4], counted[4], position[4], node[4];
    read_four(places.slot_before + row, count, slots, slot);
    read_four(places.in_bag + row, count, 0, counted);
    read_four(places.position_before + row, count, 0, position);
    for (int k = 0; k < 4; ++k) {
      int right = 0, number = next_slots;
      bool smaller = false;
      if (slot[k] < slots) {
        right = splits.sends_right(
            slot[k], codes[(i64)splits.feature[slot[k]] * rows + row + k]);
        number = nodes.pair[slot[k]];
        smaller = (right == 0) == (nodes.left_smaller[slot[k]] != 0);
      }
      const int next = 2 * number + right;
      node[k] = smaller && counted[k] != 0 ? number : -1;
      slot[k] = next < next_slots ? next : next_slots;
      position[k] = 2 * position[k] + right;
    }
    write_four(places.node + row, count, node);
    write_four(places.slot + row, count, slot);
    write_four(places.position + row, count, position);
  }
}

#define JBOOST_ROUTE(suffix, Code)                                                     \
  JBOOST_KERNEL route_##suffix(                                                        \
      Strides strides, const Code* codes, const int* feature, const int* threshold,    \
      const u8* missing_left, const u32* left_codes, const int* pair,                  \
      const u8* left_smaller, const u8* in_bag, const int* row_slot,                   \
      const int* row_position, int* node, int* slot, int* position, i64 rows,          \
      i64 slots, i64 next_slots, i64 words) {                                          \
    const Splits splits = {member(feature, strides, 1), member(threshold, strides, 2), \
                           member(missing_left, strides, 3),                           \
                           member(left_codes, strides, 4), (int)words};                \
    const Nodes nodes = {splits, member(pair, strides, 5),                             \
                         member(left_smaller, strides, 6)};                            \
    const Places places = {                                                            \
        member(in_bag, strides, 7),       member(row_slot, strides, 8),                \
        member(row_position, strides, 9), member(node, strides, 10),                   \
        member(slot, strides, 11),        member(position, strides, 12)};              \
    route(member(codes, strides, 0), nodes, places, rows, (int)slots,                  \
          (int)next_slots);                                                            \
  }

JBOOST_ROUTE(u8, u8)
JBOOST_ROUTE(u16, u16)
