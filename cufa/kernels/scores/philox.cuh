// Random numbers that are a function of their place: Philox4x32-7 (Salmon et al. 2011, "Parallel
// random numbers: as easy as 1, 2, 3", section 4.3; table 2: seven rounds pass all tests).
#pragma once

#include "ptx/ptx_common.cuh"

struct RandomWords {
    unsigned int word[4];
};

__device__ inline RandomWords philox(RandomWords counter, unsigned long long seed) {
    constexpr unsigned int kMultipliers[] = {0xd2511f53, 0xcd9e8d57};
    constexpr unsigned int kKeySteps[] = {0x9e3779b9, 0xbb67ae85};
    constexpr int kRounds = 7;
    unsigned int key[] = {static_cast<unsigned int>(seed), static_cast<unsigned int>(seed >> 32)};
    auto& [a, b, c, d] = counter.word;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
        const ptx::WideProduct first(kMultipliers[0], a), second(kMultipliers[1], c);
        a = second.high ^ b ^ key[0];
        b = second.low;
        c = first.high ^ d ^ key[1];
        d = first.low;
#pragma unroll
        for (int i = 0; i < 2; ++i) key[i] += kKeySteps[i];
    }
    return counter;
}
