// Things of which each sequence has some, in a line: sequence after sequence.
#pragma once

// Which sequence a thing is of, and its number there.
struct LinePlace {
    int batch, number;
};

// `count_of(batch)` is how many a sequence has. Whole warps call what follows, all lanes with the
// same arguments.
template <class CountOf>
struct SequenceLine {
    int batch;
    CountOf count_of;

    __device__ SequenceLine(int batch, CountOf count_of) : batch(batch), count_of(count_of) {}

    // How many there are of all sequences.
    __device__ int count() const {
        int count = 0;
#pragma unroll 4  // lengths come from far away
        for (int sequence = lane(); sequence < batch; sequence += 32) count += count_of(sequence);
        return __shfl_sync(kAllLanes, sum_to_lane(count), 31);
    }

    // Where a thing is, which there must be.
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
