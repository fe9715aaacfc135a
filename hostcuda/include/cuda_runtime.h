// CUDA's runtime header for a CPU: the parts are in hostcuda/, by role.
#pragma once
#include "hostcuda/types.h"
#include "hostcuda/runtime_api.h"
#include "hostcuda/device_functions.h"
#include "hostcuda/launch.h"
