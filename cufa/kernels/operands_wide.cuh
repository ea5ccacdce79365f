// Operands of float32 and float64: an element a register.
//
// Of a left operand a lane has (row g, depth t), (g + 8, t), (g, t + 4) and (g + 8, t + 4), of a
// right one (depth t, column g) and (t + 4, g). A product is a sum over its depth in whatever
// order: here depths t and t + 4 of an mma are elements 2t and 2t + 1, since those are what a lane
// has of an accumulator. Rows that many lanes read at once are then two apart, which lie in
// different banks.
#pragma once

#include "operands.cuh"
#include "ptx_sm80.cuh"

// Operand<N> holds N elements as tensor cores take them.
template <class T, template <int> class Operand>
struct WideOperands {
    static constexpr int kDepth = 8;
    using Left = Operand<4>;
    struct RightPair {
        Operand<2> of[2];
    };
    using Pair = Pack<T, 2>;

    __device__ static Pair pair(T low, T high) { return {low, high}; }

    template <class Tile>
    struct LeftNN {
        const T* place;

        __device__ LeftNN(const Tile& a, int row) : place(a.at(row + g(), 2 * t())) {}
        __device__ Left at(int row, int col) const {
            const T* const from = place + row * Tile::kPitch + col;
            const auto upper = *reinterpret_cast<const Pair*>(from);
            const auto lower = *reinterpret_cast<const Pair*>(from + 8 * Tile::kPitch);
            return Left({upper[0], lower[0], upper[1], lower[1]});
        }
    };
    template <class Tile>
    struct LeftTN {
        const T* place;

        __device__ LeftTN(const Tile& a, int row) : place(a.at(2 * t(), row + g())) {}
        __device__ Left at(int row, int col) const {
            const T* const even = place + col * Tile::kPitch + row;
            const T* const odd = even + Tile::kPitch;
            return Left({even[0], even[8], odd[0], odd[8]});
        }
    };
    template <int Fragments>
    __device__ static Left left_pn(const FragmentOf<T> (&p)[Fragments], int col) {
        const FragmentOf<T>& part = p[col / kMmaN];
        return Left({part[0], part[2], part[1], part[3]});
    }

    template <class Tile>
    struct RightNN {
        const T* place;

        __device__ RightNN(const Tile& v, int col) : place(v.at(2 * t(), col + g())) {}
        __device__ RightPair at(int row, int col) const {
            const T* const even = place + row * Tile::kPitch + col;
            const T* const odd = even + Tile::kPitch;
            return {Operand<2>({even[0], odd[0]}), Operand<2>({even[kMmaN], odd[kMmaN]})};
        }
    };

  protected:
    __device__ static int g() { return threadIdx.x % 32 / 4; }
    __device__ static int t() { return threadIdx.x % 4; }
};
