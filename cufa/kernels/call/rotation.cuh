// Rows whose first columns are rotated in pairs, by angles that grow with a token's position.
//
// (y1, y2) = (x1 cos - x2 sin, x1 sin + x2 cos) for the pairs of the first RotaryDim columns;
// other columns stay (Su et al. 2021, eq. 34). A pair is columns i and i + RotaryDim / 2 or, if
// Interleaved, 2 i and 2 i + 1.
#pragma once

#include "call/columns.cuh"
#include "call/numbers.cuh"

// The cosines and sines of angles, one row for each position.
template <class T>
struct AngleTables {
    const T *cos, *sin;
    int places;
};

// A row of Dims columns in parts, as small as a thread reads at once; with RotaryDim 0 all columns
// stay.
template <class T, int Dims, int RotaryDim, bool Interleaved>
struct RotatedRow {
    static constexpr int kPairs = RotaryDim / 2, kStaying = Dims - RotaryDim;
    // Pairs that a thread rotates, or columns that it copies.
    static constexpr int kTogether =
        RotaryDim ? min_of(kChunkOfRow<T, kPairs>, kChunkOfRow<T, Dims>) : kChunkOfRow<T, Dims>;
    static constexpr int kRotatedParts = kPairs / kTogether;
    static constexpr int kParts = kRotatedParts + kStaying / kTogether;
    static_assert(kStaying % kTogether == 0, "what stays must be whole chunks");
    using Chunk = Pack<T, kTogether>;

    static __device__ bool stays(int part) { return part >= kRotatedParts; }

    // Calls write(column, chunk) for the chunks of one part of row x, rotated for a position; NaN
    // for a position that the tables do not have.
    template <class Table, class Write>
    static __device__ void rotate(const T* x, int part, const AngleTables<Table>& tables,
                                  long long position, const Write& write) {
        if constexpr (RotaryDim > 0) {
            if (!stays(part)) return turn(x, part * kTogether, tables, position, write);
        }
        const int col = RotaryDim + (part - kRotatedParts) * kTogether;
        write(col, *reinterpret_cast<const Chunk*>(x + col));
    }

  private:
    // Element e of two adjacent chunks.
    static __device__ T& element(Chunk& low, Chunk& high, int e) {
        return e < kTogether ? low[e] : high[e - kTogether];
    }

    // Rotates pairs from number `first` on.
    template <class Table, class Write>
    static __device__ void turn(const T* x, int first, const AngleTables<Table>& tables,
                                long long position, const Write& write) {
        const bool known = position >= 0 && position < tables.places;
        const Table* const cos = tables.cos + position * kPairs + first;
        const Table* const sin = tables.sin + position * kPairs + first;
        const int low_col = Interleaved ? 2 * first : first;
        const int high_col = Interleaved ? low_col + kTogether : first + kPairs;
        Chunk low = *reinterpret_cast<const Chunk*>(x + low_col);
        Chunk high = *reinterpret_cast<const Chunk*>(x + high_col);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            T& a = Interleaved ? element(low, high, 2 * i) : low[i];
            T& b = Interleaved ? element(low, high, 2 * i + 1) : high[i];
            const acc_t x1 = to_acc(a), x2 = to_acc(b);
            const acc_t c = known ? acc_t(to_acc(cos[i])) : not_a_number();
            const acc_t s = known ? acc_t(to_acc(sin[i])) : not_a_number();
            a = from_acc<T>(x1 * c - x2 * s);
            b = from_acc<T>(x1 * s + x2 * c);
        }
        write(low_col, low);
        write(high_col, high);
    }
};
