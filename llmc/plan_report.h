// A plan (plan.h) as text and as JSON, and what a run that does not fit says.
#pragma once

#include <string>

#include "llmc/memory_bill.h"
#include "llmc/plan.h"

// The tables of --plan: memory, bytes sent, time floors, step time, scaling, hours and price, disk, and advice.
std::string plan_text(const Plan& plan);

// The same as one JSON object.
std::string plan_json(const Plan& plan);

// Why the run asked for is refused: the table of memory and the advice.
std::string refusal_text(const Plan& plan);

// What to say after an allocation that failed: what was planned beside what had been taken by then, and the advice.
std::string failed_allocation_text(const Plan& plan, const MemoryBill& taken);
