// How warpgroups write sums of the gradients of keys that cover only a part of the queries.
#pragma once

#include "gradients/key_sums.cuh"
#include "hopper/backward/wgmma_key_work.cuh"
#include "hopper/wgmma_products.cuh"

struct WgmmaKeySums : KeySums {
    // Writes a warpgroup's sums for 64 keys, from key number `key` of its work and column first_col
    // on.
    template <int Cols>
    __device__ void write_keys(const BackwardParams& call, const KeyWork& work, int key,
                               int first_col, const WgmmaSums<Cols>& dk) const {
        write<kKeyCols, Cols>(call, work, key, 0, first_col, dk);
    }
    template <int Cols>
    __device__ void write_values(const BackwardParams& call, const KeyWork& work, int key,
                                 int first_col, const WgmmaSums<Cols>& dv) const {
        write<kValueCols, Cols>(call, work, key, kKeyCols, first_col, dv);
    }

  private:
    // Four lanes have eight columns of a row, a whole sector of memory.
    template <int End, int Cols>
    __device__ void write(const BackwardParams& call, const KeyWork& work, int key, int begin,
                          int first_col, const WgmmaSums<Cols>& sums) const {
        const Sequence sequence = work.sequence(call);
        const int lane = threadIdx.x % 32;
        const int own_key = work.first_key + key + row_of_warp() + lane / 4;
        const int keys_end = end_of_keys(call, sequence);
        const long long first = first_row(work.batch, sequence.first_k);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int in_sequence = own_key + half * 8;
            if (in_sequence >= keys_end) continue;
            acc_t* const to =
                part_of(first, in_sequence, work.part) + begin + lane % 4 * 2 + first_col;
#pragma unroll
            for (int i = 0; i < Cols / 8; ++i) {
                if (first_col + i * 8 >= End) break;
                *reinterpret_cast<Pack<float, 2>*>(to + i * 8) = {sums[4 * i + 2 * half],
                                                                  sums[4 * i + 2 * half + 1]};
            }
        }
    }
};
