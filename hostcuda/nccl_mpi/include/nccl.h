// The subset's own nccl.h for a GPU build with NCCL over MPI: several ranks on one GPU, without NVIDIA's library.
#pragma once
#define NCCL_MPI_ON_GPU 1
#include "../../include/nccl.h"
