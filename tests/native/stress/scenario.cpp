// The text of a scenario; see the header.
#include "stress/scenario.h"

#include <array>

namespace vramx::stress {
namespace {

constexpr std::array kStepNames = {
    "kAllocate",   "kFree",          "kFreeNothing",   "kRecordStream", "kSubmit",  "kAdvance",
    "kAdvanceAll", "kReplaceStream", "kBeginCapture",  "kEndCapture",   "kTrim",    "kDefragment",
    "kSetLimit",   "kFailCall",      "kFailExhausted", "kClearFaults",  "kInspect",
};
constexpr std::array kCrossStreamNames = {"kNever", "kUnderPressure", "kAlways"};
constexpr std::array kDefectNames = {"kNone",
                                     "kWaitDoesNothing",
                                     "kQueryIsHasty",
                                     "kAliasOfWrongChunk",
                                     "kAccessNotGranted",
                                     "kReleaseDoesNothing",
                                     "kEventAtTheTake",
                                     "kStreamsByHandle",
                                     "kDeviceMissing",
                                     "kEntryNotHeld",
                                     "kGrowthNotCounted"};

template <class Names, class Enum>
std::string name_of(const Names& names, Enum value) {
  return names[static_cast<std::size_t>(value)];
}

std::string text_of(const Setup& setup) {
  std::string text = "      .setup = {.capacity = Bytes{" + std::to_string(setup.capacity.count) +
                     "},\n                .cross_stream = CrossStream::" +
                     name_of(kCrossStreamNames, setup.cross_stream);
  const Setup usual;
  const auto add = [&](const char* field, std::uint64_t value, std::uint64_t default_value) {
    if (value == default_value) return;
    text += ",\n                ." + std::string(field) + " = " + std::to_string(value);
  };
  if (setup.granularity != usual.granularity) {
    text +=
        ",\n                .granularity = Bytes{" + std::to_string(setup.granularity.count) + "}";
  }
  add("alias_mappings", setup.alias_mappings, usual.alias_mappings);
  add("alias_factor", setup.alias_factor, usual.alias_factor);
  add("mapping_ceiling", setup.mapping_ceiling, usual.mapping_ceiling);
  add("relief_blocks", setup.relief_blocks, usual.relief_blocks);
  add("check_every", setup.check_every, usual.check_every);
  if (setup.defect != Defect::kNone) {
    text += ",\n                .defect = Defect::" + name_of(kDefectNames, setup.defect);
  }
  return text + "},\n";
}

}  // namespace

std::string as_test_body(const Scenario& scenario, std::string_view name) {
  std::string text = "void " + std::string(name) + "(const Options&) {\n";
  text += "  const Scenario scenario{\n" + text_of(scenario.setup) + "      .steps = {\n";
  for (const Step& step : scenario.steps) {
    text += "          {StepKind::" + name_of(kStepNames, step.kind) + ", " +
            std::to_string(step.block) + ", " + std::to_string(step.stream) + ", " +
            std::to_string(step.amount);
    if (step.meanwhile != 0) text += ", " + std::to_string(step.meanwhile);
    if (step.pause != 0) text += ", " + std::to_string(step.pause);
    text += "},\n";
  }
  return text + "      }};\n  EXPECT(first_failure(scenario) == \"\");\n}\n";
}

}  // namespace vramx::stress
