#include "tools/workload.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <utility>

#include "npu_model/nearest.h"
#include "tools/files.h"
#include "tools/json_reader.h"

namespace cubist {
namespace {

using Json = nlohmann::json;

constexpr std::int64_t kMaxDim = 1 << 20;       // hidden sizes, ranks, head dims, FFN widths
constexpr std::int64_t kMaxCount = 1 << 16;     // layers, heads, experts, devices, scales
constexpr std::int64_t kMaxSequence = 1 << 24;  // tokens
constexpr std::int64_t kMaxFileBytes = 1 << 20;

// Reads the fields of one JSON object. The first error stays; `Finish` adds keys that nothing asked for.
class Fields {
 public:
  Fields(const Json& object, std::string path) : object_(object), path_(std::move(path)) {
    if (!object_.is_object()) Fail(fmt::format("{} is {}, expected an object", Where(), object_.type_name()));
  }

  void Integer(const char* key, std::int64_t minimum, std::int64_t maximum, std::int64_t* value) {
    const Json* field = Find(key);
    if (field == nullptr) return;
    const bool integer = field->is_number_integer();
    const bool above_int64 = field->is_number_unsigned() && field->get<std::uint64_t>() > INT64_MAX;
    if (!integer || above_int64 || field->get<std::int64_t>() < minimum ||
        field->get<std::int64_t>() > maximum) {
      Fail(fmt::format("{} is {}, expected an integer from {} to {}", Where(key), Shown(*field), minimum,
                       maximum));
      return;
    }
    *value = field->get<std::int64_t>();
  }

  void Real(const char* key, double above, double maximum, double* value) {
    const Json* field = Find(key);
    if (field == nullptr) return;
    if (!field->is_number() || !(field->get<double>() > above) || !(field->get<double>() <= maximum)) {
      Fail(fmt::format("{} is {}, expected a number above {} and up to {}", Where(key), Shown(*field), above,
                       maximum));
      return;
    }
    *value = field->get<double>();
  }

  void Flag(const char* key, bool* value) {
    const Json* field = Find(key);
    if (field == nullptr) return;
    if (!field->is_boolean()) {
      Fail(fmt::format("{} is {}, expected true or false", Where(key), Shown(*field)));
      return;
    }
    *value = field->get<bool>();
  }

  template <class Choice>
  void Word(const char* key, std::initializer_list<std::pair<const char*, Choice>> words, Choice* value) {
    const Json* field = Find(key);
    if (field == nullptr) return;
    std::string known;
    for (const auto& [word, choice] : words) {
      if (*field == word) {
        *value = choice;
        return;
      }
      known += fmt::format("{}\"{}\"", known.empty() ? "" : ", ", word);
    }
    Fail(fmt::format("{} is {}, expected one of {}", Where(key), Shown(*field), known));
  }

  void Text(const char* key, std::string* value) {
    const Json* field = Find(key);
    if (field == nullptr) return;
    const bool shown = field->is_string() && !field->get_ref<const std::string&>().empty() &&
                       field->get_ref<const std::string&>().size() <= 80;
    if (!shown) {
      Fail(fmt::format("{} is {}, expected a text of 1 to 80 bytes", Where(key), Shown(*field)));
      return;
    }
    *value = field->get<std::string>();
  }

  // Whether an optional field is there.
  bool Has(const char* key) {
    asked_.insert(key);
    return object_.is_object() && object_.contains(key);
  }

  // The object under `key`, or an empty one after an error.
  const Json& Object(const char* key) {
    static const Json kEmpty = Json::object();
    const Json* field = Find(key);
    return field == nullptr ? kEmpty : *field;
  }
  std::string Where(const char* key = nullptr) const {
    if (key == nullptr) return path_.empty() ? "the file" : path_;
    return path_.empty() ? key : path_ + "." + key;
  }

  Status Finish() {
    for (const auto& [key, value] : object_.items()) {
      if (asked_.count(key) == 0) {
        Fail(fmt::format("{} is not a known key; {}", Where(key.c_str()),
                         KnownAndNearest(key, {asked_.begin(), asked_.end()})));
      }
    }
    return status_;
  }

 private:
  const Json* Find(const char* key) {
    asked_.insert(key);
    if (!status_.ok()) return nullptr;
    const auto field = object_.find(key);
    if (field == object_.end()) {
      Fail(fmt::format("{} is missing", Where(key)));
      return nullptr;
    }
    return &*field;
  }
  void Fail(std::string message) {
    if (status_.ok()) status_ = InvalidArgument(std::move(message));
  }
  static std::string Shown(const Json& value) {
    const std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
    return text.size() <= 40 ? text : text.substr(0, 38) + "..";
  }

  const Json& object_;
  std::string path_;
  std::set<std::string> asked_;
  Status status_;
};

Status ReadAttention(const Json& json, Workload::Attention* attention) {
  Fields fields(json, "attention");
  fields.Integer("heads", 1, kMaxCount, &attention->heads);
  fields.Integer("q_rank", 1, kMaxDim, &attention->q_rank);
  fields.Integer("kv_rank", 1, kMaxDim, &attention->kv_rank);
  fields.Integer("nope_dim", 1, kMaxDim, &attention->nope_dim);
  fields.Integer("rope_dim", 1, kMaxDim, &attention->rope_dim);
  fields.Integer("v_dim", 1, kMaxDim, &attention->v_dim);
  if (fields.Has("rope_theta")) fields.Real("rope_theta", 1, 1e12, &attention->rope_theta);
  if (fields.Has("rope_layout")) {
    fields.Word("rope_layout", {{"half", RopeLayout::kHalf}, {"interleaved", RopeLayout::kInterleaved}},
                &attention->rope_layout);
  }
  return fields.Finish();
}

Status ReadMoe(const Json& json, Workload::Moe* moe) {
  Fields fields(json, "moe");
  fields.Integer("experts", 1, kMaxCount, &moe->experts);
  fields.Integer("shared_experts", 0, kMaxCount, &moe->shared_experts);
  fields.Integer("top_k", 1, kMaxCount, &moe->top_k);
  fields.Integer("ffn", 1, kMaxDim, &moe->ffn);
  fields.Integer("dense_ffn", 1, kMaxDim, &moe->dense_ffn);
  if (fields.Has("score")) {
    fields.Word("score",
                {{"softmax", ScoreFunction::kSoftmax},
                 {"sigmoid", ScoreFunction::kSigmoid},
                 {"sqrt_softplus", ScoreFunction::kSqrtSoftplus}},
                &moe->score);
  }
  if (fields.Has("router_bias")) fields.Flag("router_bias", &moe->router_bias);
  if (fields.Has("groups")) fields.Integer("groups", 1, kMaxCount, &moe->groups);
  if (fields.Has("top_groups")) fields.Integer("top_groups", 1, kMaxCount, &moe->top_groups);
  fields.Real("routed_scale", 0, 1e6, &moe->routed_scale);
  return fields.Finish();
}

Status ReadTraining(const Json& json, Workload::Training* training) {
  Fields fields(json, "training");
  fields.Integer("tensor_parallel", 1, kMaxCount, &training->tensor_parallel);
  fields.Integer("expert_shards", 1, kMaxCount, &training->expert_shards);
  fields.Integer("sequence", 1, kMaxSequence, &training->sequence);
  fields.Integer("micro_batch", 1, kMaxCount, &training->micro_batch);
  return fields.Finish();
}

Status ReadRun(const Json& json, Workload::Run* run) {
  Fields fields(json, "run");
  fields.Integer("token_scale", 1, kMaxSequence, &run->token_scale);
  fields.Integer("head_scale", 1, kMaxCount, &run->head_scale);
  return fields.Finish();
}

// What two fields say together.
Status CheckSplits(const Workload& w) {
  if (w.attention.heads % w.training.tensor_parallel != 0) {
    return InvalidArgument(
        fmt::format("attention.heads is {}, expected a multiple of training.tensor_parallel, {}",
                    w.attention.heads, w.training.tensor_parallel));
  }
  if (w.moe.experts % w.training.expert_shards != 0) {
    return InvalidArgument(fmt::format("moe.experts is {}, expected a multiple of training.expert_shards, {}",
                                       w.moe.experts, w.training.expert_shards));
  }
  if (w.attention.rope_dim % 2 != 0) {
    return InvalidArgument(
        fmt::format("attention.rope_dim is {}, expected an even number", w.attention.rope_dim));
  }
  const Workload::Moe& moe = w.moe;
  if (moe.groups > 1 && (moe.experts % moe.groups != 0 || moe.experts / moe.groups < 2)) {
    return InvalidArgument(fmt::format(
        "moe.groups is {}, expected 1 or a divisor of moe.experts, {}, that leaves 2 or more to each",
        moe.groups, moe.experts));
  }
  if (moe.top_groups > moe.groups) {
    return InvalidArgument(
        fmt::format("moe.top_groups is {}, expected at most moe.groups, {}", moe.top_groups, moe.groups));
  }
  if (const std::int64_t open = moe.experts / moe.groups * moe.top_groups; moe.top_k > open) {
    return InvalidArgument(fmt::format("moe.top_k is {}, expected at most {}", moe.top_k,
                                       moe.groups == 1
                                           ? fmt::format("moe.experts, {}", open)
                                           : fmt::format("the experts of moe.top_groups groups, {}", open)));
  }
  if (w.dense_layers > w.layers) {
    return InvalidArgument(
        fmt::format("dense_layers is {}, expected at most layers, {}", w.dense_layers, w.layers));
  }
  return {};
}

Status ReadFields(const Json& json, Workload* workload) {
  Fields fields(json, "");
  fields.Text("name", &workload->name);
  fields.Integer("hidden", 1, kMaxDim, &workload->hidden);
  fields.Integer("layers", 1, kMaxCount, &workload->layers);
  fields.Integer("dense_layers", 0, kMaxCount, &workload->dense_layers);
  if (fields.Has("norm_eps")) fields.Real("norm_eps", 0, 1, &workload->norm_eps);
  if (fields.Has("sandwich_norm")) fields.Flag("sandwich_norm", &workload->sandwich_norm);
  const Json& attention = fields.Object("attention");
  const Json& moe = fields.Object("moe");
  const Json& training = fields.Object("training");
  const Json& run = fields.Object("run");
  CUBIST_RETURN_IF_ERROR(fields.Finish());
  CUBIST_RETURN_IF_ERROR(ReadAttention(attention, &workload->attention));
  CUBIST_RETURN_IF_ERROR(ReadMoe(moe, &workload->moe));
  CUBIST_RETURN_IF_ERROR(ReadTraining(training, &workload->training));
  CUBIST_RETURN_IF_ERROR(ReadRun(run, &workload->run));
  return CheckSplits(*workload);
}

Status LoadFile(const std::string& path, Workload* workload) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return InvalidArgument(fmt::format("{}: no such file", path));
  if (!std::filesystem::is_regular_file(path, error)) {
    return InvalidArgument(fmt::format("{}: is not a regular file", path));
  }
  const std::uintmax_t bytes = std::filesystem::file_size(path, error);
  if (bytes > kMaxFileBytes) {
    return InvalidArgument(fmt::format("{}: has {} bytes; the limit is {}", path, bytes, kMaxFileBytes));
  }
  std::ifstream file(path, std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  if (!file) return InvalidArgument(fmt::format("{}: cannot be read", path));
  return ParseWorkload(text, path, workload);
}

}  // namespace

Status ParseWorkload(std::string_view json, const std::string& origin, Workload* workload) {
  Json parsed;
  Status status = ReadJson(json, &parsed);
  Workload read;
  if (status.ok()) status = ReadFields(parsed, &read);
  if (!status.ok()) return InvalidArgument(fmt::format("{}: {}", origin, status.message()));
  *workload = std::move(read);
  return {};
}

std::vector<std::string> WorkloadFolders() {
  return FoldersOf(CUBIST_WORKLOADS_FROM_PREFIX, CUBIST_WORKLOADS_IN_SOURCE, CUBIST_WORKLOADS_INSTALLED);
}

std::vector<std::string> WorkloadNames(const std::vector<std::string>& folders) {
  std::set<std::string> names;
  for (const std::string& folder : folders) {
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
      if (entry.path().extension() == ".json") names.insert(entry.path().stem().string());
    }
  }
  return {names.begin(), names.end()};
}

Status LoadWorkload(const std::string& name_or_path, const std::vector<std::string>& folders,
                    Workload* workload) {
  const bool path = name_or_path.find('/') != std::string::npos || name_or_path.ends_with(".json");
  if (path) return LoadFile(name_or_path, workload);
  for (const std::string& folder : folders) {
    const std::string file = fmt::format("{}/{}.json", folder, name_or_path);
    std::error_code error;
    if (std::filesystem::exists(file, error)) return LoadFile(file, workload);
  }
  return InvalidArgument(fmt::format("no workload is named '{}'; {}; a path ends in .json", name_or_path,
                                     KnownAndNearest(name_or_path, WorkloadNames(folders))));
}

}  // namespace cubist
