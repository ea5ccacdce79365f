// Items of all sequences in a line, sequence after sequence.
#pragma once

// The sequence of an item, and its number in that sequence.
struct LinePlace {
    int batch, number;
};

// `count_of(batch)` is the number of items of a sequence. Whole warps call these functions, all
// lanes with the same arguments.
template <class CountOf>
struct SequenceLine {
    int batch;
    CountOf count_of;

    __device__ SequenceLine(int batch, CountOf count_of)
        : batch(batch), count_of(count_of), first(counts_from(0)) {}

    // The number of items of all sequences.
    __device__ int count() const {
        const int of_first = __shfl_sync(kAllLanes, first.end, 31);
        if (batch <= 32) return of_first;
        int count = 0;
#pragma unroll 4  // lengths take long to load
        for (int sequence = 32 + lane(); sequence < batch; sequence += 32)
            count += count_of(sequence);
        return of_first + __shfl_sync(kAllLanes, sum_to_lane(count), 31);
    }

    // The place of an item, which must exist.
    __device__ LinePlace at(int number) const {
        LaneCounts counts = first;
        for (int begin = 0;; counts = counts_from(begin)) {
            const unsigned int beyond = __ballot_sync(kAllLanes, counts.end > number);
            if (beyond == 0) {
                number -= __shfl_sync(kAllLanes, counts.end, 31);
                begin += 32;
                continue;
            }
            const int source = __ffs(static_cast<int>(beyond)) - 1;
            const int before = __shfl_sync(kAllLanes, counts.end - counts.count, source);
            return {begin + source, number - before};
        }
    }

  private:
    static constexpr unsigned int kAllLanes = 0xffffffffu;

    // The items of a lane's sequence, of 32 in a row, and of all of these up to it.
    struct LaneCounts {
        int count, end;
    };
    const LaneCounts first;  // of the line's beginning: often there are no more

    __device__ LaneCounts counts_from(int begin) const {
        const int sequence = begin + lane(), count = sequence < batch ? count_of(sequence) : 0;
        return {count, sum_to_lane(count)};
    }

    __device__ static int lane() { return threadIdx.x % 32; }

    // The sum over all lanes up to this one.
    __device__ static int sum_to_lane(int value) {
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int below = __shfl_up_sync(kAllLanes, value, distance);
            if (lane() >= distance) value += below;
        }
        return value;
    }
};
