// Every seed of every target, and small changes of each: what the fuzzers begin with, run in every build.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "tests/fuzz/targets.h"

namespace cubist::fuzz {
namespace {

constexpr int kChanges = 100;  // of each seed

std::vector<std::byte> Read(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

// Overwrites, repeats or drops a few bytes.
std::vector<std::byte> Changed(std::vector<std::byte> bytes, std::mt19937_64& random) {
  for (std::uint64_t changes = 1 + random() % 4; changes > 0 && !bytes.empty(); --changes) {
    const auto at = static_cast<std::ptrdiff_t>(random() % bytes.size());
    switch (random() % 3) {
      case 0:
        bytes[static_cast<std::size_t>(at)] = static_cast<std::byte>(random());
        break;
      case 1:
        bytes.insert(bytes.begin() + at, static_cast<std::byte>(random()));
        break;
      default:
        bytes.erase(bytes.begin() + at);
    }
  }
  return bytes;
}

class FuzzSeeds : public ::testing::TestWithParam<Target> {};

TEST_P(FuzzSeeds, BreakNoPromise) {
  std::mt19937_64 random(1);
  int seeds = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string(CUBIST_FUZZ_SEEDS "/") + GetParam().name)) {
    const std::vector<std::byte> seed = Read(entry.path());
    GetParam().run(seed);
    for (int i = 0; i < kChanges; ++i) GetParam().run(Changed(seed, random));
    ++seeds;
  }
  EXPECT_GT(seeds, 0) << "no seeds for " << GetParam().name;
}

INSTANTIATE_TEST_SUITE_P(Targets, FuzzSeeds, ::testing::ValuesIn(kTargets),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace cubist::fuzz
