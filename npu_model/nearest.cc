#include "npu_model/nearest.h"

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <iterator>
#include <numeric>
#include <sstream>
#include <tuple>
#include <utility>

namespace cubist {
namespace {

// Letters put in, left out, changed, or changed places with their neighbours.
std::size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before, last, row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    before = std::exchange(last, row);
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      row[j + 1] = std::min({last[j] + (a[i] == b[j] ? 0 : 1), row[j] + 1, last[j + 1] + 1});
      if (i > 0 && j > 0 && a[i] == b[j - 1] && a[i - 1] == b[j])
        row[j + 1] = std::min(row[j + 1], before[j - 1] + 1);
    }
  }
  return row.back();
}

std::string Lower(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return lower;
}

// With a blank for each separator.
std::string Plain(std::string text) {
  for (char& c : text) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = ' ';
  }
  return text;
}

std::vector<std::string> WordsOf(const std::string& plain) {
  std::istringstream stream(plain);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

// How like a name is to the wanted one.
struct Likeness {
  bool near = false;
  int tier = 0;      // 2: goes on where the wanted one ends; 1: has it inside
  double share = 0;  // of letters or of words that are the same

  bool operator<(const Likeness& other) const {
    return std::tie(near, tier, share) < std::tie(other.near, other.tier, other.share);
  }
};

// Of names in lower case.
Likeness LikenessOf(const std::string& wanted, const std::string& name) {
  constexpr std::size_t kLeastBefore = 2, kLeastInside = 3;  // Letters that are no accident.
  const std::size_t at = name.find(wanted);
  const int tier = at == 0 && wanted.size() >= kLeastBefore                   ? 2
                   : at != std::string::npos && wanted.size() >= kLeastInside ? 1
                                                                              : 0;
  const std::string plain = Plain(wanted), plain_name = Plain(name);
  const auto longest = static_cast<double>(std::max({wanted.size(), name.size(), std::size_t{1}}));
  const double letters = 1 - static_cast<double>(EditDistance(plain, plain_name)) / longest;
  const std::vector<std::string> of_wanted = WordsOf(plain), of_name = WordsOf(plain_name);
  const auto shared = std::count_if(of_wanted.begin(), of_wanted.end(), [&](const std::string& word) {
    return word.size() >= kLeastBefore && std::find(of_name.begin(), of_name.end(), word) != of_name.end();
  });
  const auto all = std::max<double>(static_cast<double>(of_wanted.size() + of_name.size()), 1);
  const bool near = tier > 0 || letters >= 0.5 || (shared > 0 && 2 * shared >= std::ssize(of_wanted));
  return {near, tier, std::max(letters, 2 * static_cast<double>(shared) / all)};
}

}  // namespace

const std::string* Nearest(std::string_view wanted, const std::vector<std::string>& names) {
  const std::string lower = Lower(wanted);
  const std::string* nearest = nullptr;
  Likeness best;
  for (const std::string& name : names) {
    const Likeness likeness = LikenessOf(lower, Lower(name));
    if (likeness.near && best < likeness) best = likeness, nearest = &name;
  }
  return nearest;
}

std::string NearestText(std::string_view wanted, const std::vector<std::string>& names) {
  const std::string* nearest = Nearest(wanted, names);
  return nearest == nullptr ? "" : "; the nearest is " + *nearest;
}

std::string KnownAndNearest(std::string_view wanted, const std::vector<std::string>& names) {
  if (names.empty()) return "none is known";
  std::string text = "known are ";
  for (const std::string& name : names) text += name + (&name == &names.back() ? "" : ", ");
  return text + NearestText(wanted, names);
}

}  // namespace cubist
