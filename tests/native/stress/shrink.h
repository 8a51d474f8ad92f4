// Cuts a failing scenario down to steps of which none can be left out (ddmin: Zeller and
// Hildebrandt, "Simplifying and isolating failure-inducing input", 2002).
//
// Every attempt runs in a child process, so that an attempt that crashes is one that fails. A few
// hundred attempts for a thousand steps.
#pragma once

#include <functional>
#include <string>

#include "stress/scenario.h"

namespace vramx::stress {

// What `attempt` returns in a child process, or "crash: signal N".
std::string in_child(const std::function<std::string()>& attempt);
std::string first_failure_in_child(const Scenario& scenario);

// The scenario fails with `failure`; so does the result, with one of the same kind (the text up to
// the colon).
Scenario shrink(Scenario scenario, const std::string& failure);

}  // namespace vramx::stress
