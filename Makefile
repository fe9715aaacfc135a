# llm.zero: builds the same sources for a GPU (nvcc) or for any CPU (g++ or clang++ with hostcuda).
#
#   make train_gpt            the trainer, and the default data set where it is missing
#   make test_gpt             the numerical check against the reference dumps
#   make test                 the covering test suite;  make test-long: the full matrices
#   make bench                kernel microbenchmarks (dev/cuda)
#   make clean
#
# Knobs: DEVICE=cpu|cuda  PRECISION=BF16|FP32  CXX=g++|clang++  ASAN=1  TSAN=1  DEBUG=1  MARCH=native
#        GPU_ARCHS="80 90a"  NCCL=mpi (GPU build whose collectives go over MPI: several ranks on one GPU, for testing)
# Everything is made under build/<variant>/; ./train_gpt and ./test_gpt are links to the variant built last.

ifeq ($(filter -j%,$(MAKEFLAGS)),)
MAKEFLAGS += -j$(shell nproc)
endif
.DEFAULT_GOAL := train_gpt
.DELETE_ON_ERROR:
.SUFFIXES:

# ---------------------------------------------------------------------------------------------------------------------
# What is here, and what is chosen
NVCC      ?= $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
GPU       := $(shell nvidia-smi -L 2>/dev/null | head -n 1)
PRECISION ?= BF16
PYTHON    ?= python3
MARCH     ?= native

ifeq ($(DEVICE),)
  ifeq ($(and $(NVCC),$(GPU)),)
    DEVICE := cpu
    WHY    := $(if $(NVCC),nvcc found but no GPU,no nvcc)
  else
    DEVICE := cuda
    WHY    := nvcc and a GPU found
  endif
else
  WHY := as asked
endif
ifeq ($(filter $(DEVICE),cpu cuda),)
  $(error DEVICE=$(DEVICE) is neither cpu nor cuda)
endif
ifeq ($(filter $(PRECISION),BF16 FP32),)
  $(error PRECISION=$(PRECISION) is neither BF16 nor FP32)
endif
ifeq ($(origin CXX),default)
  CXX := g++
endif

COMPILER_TAG := $(if $(findstring clang,$(CXX)),-clang)
SANITIZER    := $(if $(ASAN),-asan)$(if $(TSAN),-tsan)$(if $(DEBUG),-debug)
HOST         := build/host$(COMPILER_TAG)$(SANITIZER)
VARIANT      := build/$(DEVICE)-$(PRECISION)$(COMPILER_TAG)$(SANITIZER)

MPI_CFLAGS := $(shell mpicc --showme:compile 2>/dev/null)
MPI_LIBS   := $(shell mpicc --showme:link 2>/dev/null)
ifeq ($(MPI_LIBS),)
  ifneq ($(MAKECMDGOALS),clean)
    $(error OpenMPI's mpicc is not on the path; install libopenmpi-dev and openmpi-bin, or run: bash scripts/quickstart.sh)
  endif
endif

# ---------------------------------------------------------------------------------------------------------------------
# Flags. No -ffast-math: it breaks infinities; the two below only drop errno and trap semantics.
WARNINGS  := -Wall -Wextra
OPTIMIZE  := $(if $(DEBUG),-O0 -g,$(if $(ASAN)$(TSAN),-O1 -g,-O3 -g1))
ifneq ($(ASAN),)
  SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
endif
ifneq ($(TSAN),)
  SANITIZE := -fsanitize=thread
endif
CXXFLAGS_COMMON := -std=c++20 $(OPTIMIZE) -march=$(MARCH) -fno-math-errno -fno-trapping-math $(WARNINGS) $(SANITIZE) -MMD -MP -I. $(MPI_CFLAGS) -DOMPI_SKIP_MPICXX
PRECISION_FLAG  := $(if $(filter FP32,$(PRECISION)),-DPRECISION_FP32)

HOSTCUDA_SOURCES := $(wildcard hostcuda/src/*.cpp hostcuda/nccl_mpi/*.cpp)
LLMC_SOURCES     := $(wildcard llmc/*.cpp)
HOSTCUDA_OBJECTS := $(HOSTCUDA_SOURCES:%.cpp=$(HOST)/%.o)
LLMC_OBJECTS     := $(LLMC_SOURCES:%.cpp=$(HOST)/%.o)

ifeq ($(DEVICE),cpu)
  CU_COMPILE   = $(CXX) $(CXXFLAGS_COMMON) $(PRECISION_FLAG) -Wno-unknown-pragmas -Ihostcuda/include -x c++ -c
  DEVICE_LIB  := $(HOST)/libhostcuda.a
  DEVICE_LIBS := -ldnnl -lgomp $(if $(filter x86_64,$(shell uname -m)),,-lboost_context) $(MPI_LIBS) -lpthread -ldl
else
  ifeq ($(NVCC),)
    $(error DEVICE=cuda needs nvcc on the path)
  endif
  CUDA_HOME   := $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
  GPU_ARCHS   ?= $(if $(GPU),native,80 90a)
  GENCODE     := $(if $(filter native,$(GPU_ARCHS)),-arch=native,$(foreach a,$(GPU_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)))
  NVCCFLAGS   := -std=c++20 -O3 --threads 2 -lineinfo $(GENCODE) -Xcompiler -Wall,-Wextra,-Wno-unused-parameter -MMD -MP -I. $(if $(filter mpi,$(NCCL)),-Ihostcuda/nccl_mpi/include) $(MPI_CFLAGS) -DOMPI_SKIP_MPICXX
  CU_COMPILE   = $(NVCC) $(NVCCFLAGS) $(PRECISION_FLAG) -x cu -c
  DEVICE_LIB  := $(if $(filter mpi,$(NCCL)),$(VARIANT)/libnccl_mpi.a)
  DEVICE_LIBS := -L$(CUDA_HOME)/lib64 -lcudart -lcublasLt $(if $(filter mpi,$(NCCL)),,-lnccl) $(MPI_LIBS) -lpthread -ldl
endif
LINK = $(CXX) $(SANITIZE) -rdynamic -o $@

# ---------------------------------------------------------------------------------------------------------------------
# The programs
.PHONY: train_gpt test_gpt programs test test-long bench clean banner data FORCE
train_gpt test_gpt: %: $(VARIANT)/% | banner
	@ln -sfn $< $@
train_gpt: | data

programs: $(VARIANT)/train_gpt $(VARIANT)/test_gpt

banner:
	@echo "llm.zero: DEVICE=$(DEVICE) ($(WHY)) PRECISION=$(PRECISION) $(if $(filter cpu,$(DEVICE)),compiler $(CXX),nvcc $(NVCC) for $(GPU_ARCHS))  nvcc: $(or $(NVCC),none)  GPU: $(or $(GPU),none)  MPI: $(shell mpirun --version 2>/dev/null | head -n 1)"

$(VARIANT)/%: $(VARIANT)/%.o $(HOST)/libllmc.a $(DEVICE_LIB)
	$(LINK) $< $(HOST)/libllmc.a $(DEVICE_LIB) $(EXTRA_LIBS) -lxxhash $(DEVICE_LIBS)

$(VARIANT)/%.o: %.cu
	@mkdir -p $(@D)
	$(CU_COMPILE) $< -o $@

$(HOST)/%.o: %.cpp
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS_COMMON) $(if $(filter hostcuda/%,$<),-Ihostcuda/include) -c $< -o $@

$(HOST)/libhostcuda.a: $(HOSTCUDA_OBJECTS)
$(HOST)/libllmc.a: $(LLMC_OBJECTS)
$(HOST)/lib%.a:
	@rm -f $@
	ar rcs $@ $^

# The default data set: the sources of this machine's own Python standard library (no network, no package).
data: data/python-stdlib/train_000.bin
data/python-stdlib/train_000.bin:
	$(PYTHON) dev/data/prepare.py --dataset python-stdlib --out data/python-stdlib

# ---------------------------------------------------------------------------------------------------------------------
# Unit tests: one binary a file. dev/test/test_*.cu and *.cpp, hostcuda/test/test_*.cpp (GoogleTest);
# hostcuda/test/mpi_test_*.cpp and dev/test/mpi_test_*.cu have a main of their own and run under mpirun.
CU_TESTS       := $(patsubst %.cu,$(VARIANT)/%,$(wildcard dev/test/test_*.cu))
CU_MPI_TESTS   := $(patsubst %.cu,$(VARIANT)/%,$(wildcard dev/test/mpi_test_*.cu))
HOST_TESTS     := $(patsubst %.cpp,$(HOST)/%,$(wildcard dev/test/test_*.cpp))
HOSTCUDA_TESTS := $(patsubst %.cpp,$(HOST)/%,$(wildcard hostcuda/test/test_*.cpp))
HOSTCUDA_MPI_TESTS := $(patsubst %.cpp,$(HOST)/%,$(wildcard hostcuda/test/mpi_test_*.cpp))
GTEST_LIBS     := -lgtest_main -lgtest

$(CU_TESTS): EXTRA_LIBS = $(GTEST_LIBS)
$(HOST)/dev/test/test_%: $(HOST)/dev/test/test_%.o $(HOST)/libllmc.a
	$(LINK) $< $(HOST)/libllmc.a $(GTEST_LIBS) -lxxhash -lpthread
$(HOST)/hostcuda/test/test_%: $(HOST)/hostcuda/test/test_%.o $(HOST)/libhostcuda.a
	$(LINK) $< $(HOST)/libhostcuda.a $(GTEST_LIBS) -ldnnl -lgomp $(MPI_LIBS) -lpthread -ldl
$(HOST)/hostcuda/test/mpi_test_%: $(HOST)/hostcuda/test/mpi_test_%.o $(HOST)/libhostcuda.a
	$(LINK) $< $(HOST)/libhostcuda.a -ldnnl -lgomp $(MPI_LIBS) -lpthread -ldl

.PHONY: kernel-tests mpi-tests host-tests hostcuda-tests hostcuda-mpi-tests
kernel-tests: $(CU_TESTS)
mpi-tests: $(CU_MPI_TESTS)
host-tests: $(HOST_TESTS)
hostcuda-tests: $(HOSTCUDA_TESTS)
hostcuda-mpi-tests: $(HOSTCUDA_MPI_TESTS)

clean:
	rm -rf build train_gpt test_gpt

.SECONDARY:
-include $(shell find build -name '*.d' 2>/dev/null)
