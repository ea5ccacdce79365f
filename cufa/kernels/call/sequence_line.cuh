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

    __device__ SequenceLine(int batch, CountOf count_of) : batch(batch), count_of(count_of) {}

    // The number of items of all sequences.
    __device__ int count() const {
        int count = 0;
#pragma unroll 4  // lengths take long to load
        for (int sequence = lane(); sequence < batch; sequence += 32) count += count_of(sequence);
        return __shfl_sync(kAllLanes, sum_to_lane(count), 31);
    }

    // The place of an item, which must exist.
    __device__ LinePlace at(int number) const {
        for (int first = 0;; first += 32) {
            const int sequence = first + lane();
            const int count = sequence < batch ? count_of(sequence) : 0;
            const int end = sum_to_lane(count);
            const unsigned int beyond = __ballot_sync(kAllLanes, end > number);
            if (beyond == 0) {
                number -= __shfl_sync(kAllLanes, end, 31);
                continue;
            }
            const int source = __ffs(static_cast<int>(beyond)) - 1;
            return {first + source, number - __shfl_sync(kAllLanes, end - count, source)};
        }
    }

  private:
    static constexpr unsigned int kAllLanes = 0xffffffffu;

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
