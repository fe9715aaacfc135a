# llm.zero: builds the same sources for a GPU (nvcc) or for any CPU (g++ or clang++ with hostcuda).
#
#   make train_gpt            the trainer, and the default data set where it is missing
#   make test_gpt             the numerical check against the reference dumps
#   make bench                every kernel's benchmark in one program (dev/cuda)
#   make kernel-table         dev/gpu/kernels.md: registers, spills and memory accesses of the GPU kernels
#   make test                 the covering test suite;  make test-long: the full matrices
#   make clean
#
# Knobs: DEVICE=cpu|cuda  PRECISION=BF16|FP32  CXX=g++|clang++  ASAN=1  TSAN=1  DEBUG=1  MARCH=native
#        GPU_ARCHS="80 89 90a" GPU_PTX=90 (native where a GPU is)  NCCL=mpi (GPU build whose collectives go over MPI: several ranks
#        on one GPU, for testing)
# Everything is made under build/<variant>/; ./train_gpt, ./test_gpt and ./bench are links to the variant built last.

ifeq ($(MAKELEVEL)$(filter -j%,$(MAKEFLAGS)),0)
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
MARCH_TAG    := $(if $(filter-out native,$(MARCH)),-$(MARCH))
HOST         := build/host$(COMPILER_TAG)$(MARCH_TAG)$(SANITIZER)
VARIANT      := build/$(DEVICE)-$(PRECISION)$(if $(filter cuda-mpi,$(DEVICE)-$(NCCL)),-mpi)$(COMPILER_TAG)$(MARCH_TAG)$(SANITIZER)

MPI_CFLAGS := $(shell mpicc --showme:compile 2>/dev/null)
MPI_LIBS   := $(shell mpicc --showme:link 2>/dev/null)
ifeq ($(MPI_LIBS),)
  ifneq ($(MAKECMDGOALS),clean)
    $(error OpenMPI's mpicc is not on the path; install libopenmpi-dev and openmpi-bin, or run: bash scripts/quickstart.sh)
  endif
endif

# ---------------------------------------------------------------------------------------------------------------------
# Flags. No -ffast-math: it breaks infinities; the two below only drop errno and trap semantics.
# clang warns of a loop that UNROLL asks for and it cannot unroll; on a CPU that is no harm.
WARNINGS  := -Wall -Wextra $(if $(findstring clang,$(CXX)),-Wno-pass-failed)
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
  # Machine code for A100, RTX 40 / L40 and H100 / H200; newer cards compile the PTX at the first start. sm_90a's own PTX would run nowhere else.
  GPU_ARCHS   ?= $(if $(GPU),native,80 89 90a)
  GPU_PTX     ?= $(if $(GPU),,90)
  GENCODE     := $(if $(filter native,$(GPU_ARCHS)),-arch=native,$(foreach a,$(GPU_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) $(foreach a,$(GPU_PTX),-gencode arch=compute_$(a),code=compute_$(a)))
  NCCL_MPI    := $(if $(filter mpi,$(NCCL)),-Ihostcuda/nccl_mpi/include)
  NVCCFLAGS   := -std=c++20 -O3 --threads 2 -lineinfo $(GENCODE) -Xcompiler -Wall,-Wextra,-Wno-unused-parameter -MMD -MP -I. $(NCCL_MPI) $(MPI_CFLAGS) -DOMPI_SKIP_MPICXX
  CU_COMPILE   = $(NVCC) $(NVCCFLAGS) $(PRECISION_FLAG) -x cu -c
  # The cards that a folder's objects are for, and what nvcc is told by its environment: others are a reason to compile again.
  CARDS       := $(VARIANT)/cards.txt
  DEVICE_LIB  := $(if $(filter mpi,$(NCCL)),$(VARIANT)/libnccl_mpi.a)
  DEVICE_LIBS := -L$(CUDA_HOME)/lib64 -lcudart -lcublasLt $(if $(filter mpi,$(NCCL)),,-lnccl) $(MPI_LIBS) -lpthread -ldl
endif
LINK = $(CXX) $(SANITIZE) -rdynamic -o $@

# ---------------------------------------------------------------------------------------------------------------------
# The programs
.PHONY: train_gpt test_gpt bench programs test test-long test-cuda clean banner data
train_gpt test_gpt bench: %: $(VARIANT)/% | banner
	@ln -sfn $< $@
train_gpt: | data

programs: $(VARIANT)/train_gpt $(VARIANT)/test_gpt

banner:
	@echo "llm.zero: DEVICE=$(DEVICE) ($(WHY)) PRECISION=$(PRECISION) $(if $(filter cpu,$(DEVICE)),compiler $(CXX),nvcc $(NVCC) for $(GPU_ARCHS))  nvcc: $(or $(NVCC),none)  GPU: $(or $(GPU),none)  MPI: $(shell mpirun --version 2>/dev/null | head -n 1)"

$(VARIANT)/%: $(VARIANT)/%.o $(HOST)/libllmc.a $(DEVICE_LIB)
	$(LINK) $< $(HOST)/libllmc.a $(DEVICE_LIB) $(EXTRA_LIBS) -lxxhash $(DEVICE_LIBS)

$(VARIANT)/%.o: %.cu $(CARDS)
	@mkdir -p $(@D)
	$(CU_COMPILE) $< -o $@

$(HOST)/%.o: %.cpp
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS_COMMON) $(if $(filter hostcuda/%,$<),-Ihostcuda/include) -c $< -o $@

.PHONY: always
build/cuda-%/cards.txt: always
	@mkdir -p $(@D)
	@echo '$(GENCODE) $(NVCC_APPEND_FLAGS)' | cmp -s - $@ || echo '$(GENCODE) $(NVCC_APPEND_FLAGS)' > $@

# NCCL=mpi: hostcuda's collectives over MPI, compiled against the real CUDA runtime.
$(VARIANT)/nccl_mpi.o: hostcuda/nccl_mpi/nccl_mpi.cpp
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS_COMMON) $(NCCL_MPI) -I$(CUDA_HOME)/include -c $< -o $@
$(VARIANT)/libnccl_mpi.a: $(VARIANT)/nccl_mpi.o
	@rm -f $@
	ar rcs $@ $^

$(HOST)/libhostcuda.a: $(HOSTCUDA_OBJECTS)
$(HOST)/libllmc.a: $(LLMC_OBJECTS)
$(HOST)/lib%.a:
	@rm -f $@
	ar rcs $@ $^

# The benchmarks: dev/cuda/NAME.cu measures llmc/NAME.cuh. bench is all of them in one unit; each can also be built alone ($(VARIANT)/dev/cuda/NAME).
BENCHES := $(patsubst %.cu,$(VARIANT)/%,$(wildcard dev/cuda/*.cu))
$(VARIANT)/bench.cu: $(wildcard dev/cuda/*.cu)
	@mkdir -p $(@D)
	@printf '#include "%s"\n' $^ > $@
$(VARIANT)/bench.o: $(VARIANT)/bench.cu $(CARDS)
	$(CU_COMPILE) $< -o $@
$(BENCHES) $(VARIANT)/bench: EXTRA_LIBS = -lbenchmark

# The static record of the kernels: dev/gpu/kernels.md holds what ptxas and the disassembler say of each, for the cards that GPU_ARCHS names elsewhere.
# The toolkit's disassembler is taken where it has one, else NVIDIA's Python packages are put into build/gpu-tools.
TABLE_ARCHS   := 80 89 90a
TABLE_CUBINS  := $(TABLE_ARCHS:%=$(VARIANT)/train_gpt.sm_%.cubin)
GPU_TOOLS     := build/gpu-tools
DISASSEMBLER  := $(if $(wildcard $(CUDA_HOME)/bin/cuobjdump),,$(GPU_TOOLS)/installed-requirements.txt)
$(TABLE_CUBINS): $(VARIANT)/train_gpt.sm_%.cubin: train_gpt.cu
	@mkdir -p $(@D)
	$(NVCC) $(filter-out $(GENCODE),$(NVCCFLAGS)) $(PRECISION_FLAG) -gencode arch=compute_$*,code=sm_$* -Xptxas -v -cubin -x cu $< -o $@ \
	    2> $(@:.cubin=.ptxas.txt) || { cat $(@:.cubin=.ptxas.txt) >&2; exit 1; }
$(GPU_TOOLS)/installed-requirements.txt: dev/gpu/requirements.txt
	@rm -rf $(@D)
	PIP_ROOT_USER_ACTION=ignore $(PYTHON) -m pip install --quiet --disable-pip-version-check --target $(@D) -r $<
	@cp $< $@
.PHONY: kernel-table check-kernel-table kernel-table-from-cubins check-kernel-table-from-cubins
kernel-table check-kernel-table:
	@$(MAKE) --no-print-directory DEVICE=cuda PRECISION=BF16 $@-from-cubins
kernel-table-from-cubins check-kernel-table-from-cubins: $(TABLE_CUBINS) $(DISASSEMBLER)
	@PATH="$(abspath $(GPU_TOOLS))/nvidia/cu13/bin:$(CUDA_HOME)/bin:$$PATH" $(PYTHON) dev/gpu/kernel_table.py --nvcc "$$($(NVCC) --version)" \
	    --table dev/gpu/kernels.md $(if $(filter kernel-table%,$@),--write) $(TABLE_CUBINS)

# The default data set: the sources of this machine's own Python standard library (no network, no package).
data: data/python-stdlib/train_000.bin
data/python-stdlib/train_000.bin:
	$(PYTHON) dev/data/prepare.py --dataset python-stdlib --out data/python-stdlib

# ---------------------------------------------------------------------------------------------------------------------
# Tests. dev/test/test_*.cu are the kernels' (GoogleTest; each can be built alone, kernel_tests is all of them in one unit, which compiles
# many times faster than the files one by one), test_*.cpp the host side's, hostcuda/test/test_*.cpp hostcuda's;
# mpi_test_* have a main of their own and run under mpirun; *.py run under pytest. dev/test/run_tests.py runs them all and counts.
CU_TESTS           := $(patsubst %.cu,$(VARIANT)/%,$(wildcard dev/test/test_*.cu))
CU_MPI_TESTS       := $(patsubst %.cu,$(VARIANT)/%,$(wildcard dev/test/mpi_test_*.cu))
HOST_TESTS         := $(patsubst %.cpp,$(HOST)/%,$(wildcard dev/test/test_*.cpp))
HOSTCUDA_TESTS     := $(patsubst %.cpp,$(HOST)/%,$(wildcard hostcuda/test/test_*.cpp))
HOSTCUDA_MPI_TESTS := $(patsubst %.cpp,$(HOST)/%,$(wildcard hostcuda/test/mpi_test_*.cpp))
GTEST_LIBS         := -lgtest_main -lgtest
HOSTCUDA_LIBS      := -ldnnl -lgomp $(MPI_LIBS) -lpthread -ldl

$(VARIANT)/kernel_tests.cu: $(wildcard dev/test/test_*.cu)
	@mkdir -p $(@D)
	@printf '#include "%s"\n' $^ > $@
$(VARIANT)/kernel_tests.o: $(VARIANT)/kernel_tests.cu $(CARDS)
	$(CU_COMPILE) $< -o $@
$(CU_TESTS) $(VARIANT)/kernel_tests: EXTRA_LIBS = $(GTEST_LIBS)
$(HOST)/dev/test/test_%: $(HOST)/dev/test/test_%.o $(HOST)/libllmc.a
	$(LINK) $< $(HOST)/libllmc.a $(GTEST_LIBS) -lxxhash $(MPI_LIBS) -lpthread
$(HOST)/hostcuda/test/test_%: $(HOST)/hostcuda/test/test_%.o $(HOST)/libhostcuda.a
	$(LINK) $< $(HOST)/libhostcuda.a $(GTEST_LIBS) $(HOSTCUDA_LIBS)
$(HOST)/hostcuda/test/mpi_test_%: $(HOST)/hostcuda/test/mpi_test_%.o $(HOST)/libhostcuda.a
	$(LINK) $< $(HOST)/libhostcuda.a $(HOSTCUDA_LIBS)

.PHONY: kernel-tests mpi-tests host-tests hostcuda-tests
kernel-tests: $(VARIANT)/kernel_tests
mpi-tests: $(CU_MPI_TESTS)
host-tests: $(HOST_TESTS)
hostcuda-tests: $(HOSTCUDA_TESTS) $(HOSTCUDA_MPI_TESTS)

# The suites, each `KIND [key=value ...] COMMAND` as dev/test/run_tests.py takes them. `make test` is the covering subset, `make test-long` adds the rest.
B := build/cpu-BF16
F := build/cpu-FP32
C := build/cpu-BF16-clang
A := build/cpu-BF16-asan
T := build/cpu-BF16-tsan
SHARDS      := 'data/python-stdlib/train_*.bin'
THREE_STEPS := --steps 3 --warmup 1 --micro-batch 2 --seq-len 64 --total-batch 512 --zero-stage 3 --bucket-mb 0 --recompute ffn --lmhead-chunks 2 --val-batches 2 --sample-every 0
TSAN_RUN    := TSAN_OPTIONS=suppressions=hostcuda/tsan.supp:halt_on_error=1:ignore_noninstrumented_modules=1
ASAN_RUN    := ASAN_OPTIONS=detect_leaks=0

define SUITES_TEST
$(foreach t,$(notdir $(HOSTCUDA_TESTS)),"gtest name=hostcuda-$(t) build/host/hostcuda/test/$(t)")
"run name=nccl build/host/hostcuda/test/mpi_test_nccl"
$(foreach t,$(notdir $(HOST_TESTS)),"gtest name=$(t) build/host/dev/test/$(t)")
"gtest name=kernels-bf16 $(B)/kernel_tests"
"gtest name=kernels-fp32 $(F)/kernel_tests"
"gtest name=kernels-clang $(C)/kernel_tests"
$(foreach s,1 2,"gtest name=kernels-schedule-$(s) HOSTCUDA_SCHEDULE=$(s) $(B)/kernel_tests")
"gtest name=kernels-async HOSTCUDA_ASYNC=1 $(B)/kernel_tests"
"gtest name=kernels-protect HOSTCUDA_PROTECT=1 $(B)/kernel_tests"
"gtest name=attention-sm_89 HOSTCUDA_ARCH=89 $(B)/kernel_tests --gtest_filter=*Attention*"
"gtest name=kernels-asan timeout=600 $(ASAN_RUN) $(A)/kernel_tests"
"gtest name=kernels-tsan timeout=900 $(TSAN_RUN) $(T)/kernel_tests"
"run name=test_gpt-bf16 $(B)/test_gpt"
"run name=test_gpt-fp32 $(F)/test_gpt"
"run name=test_gpt-clang $(C)/test_gpt"
$(foreach n,2 3,"mpi name=zero-bf16-$(n) np=$(n) $(B)/dev/test/mpi_test_zero")
$(foreach n,1 4 5 7,"mpi name=zero-bf16-$(n)-quick np=$(n) $(B)/dev/test/mpi_test_zero --quick")
$(foreach n,2 4,"mpi name=accounts-$(n) np=$(n) $(B)/dev/test/mpi_test_accounts")
"mpi name=zero-fp32-2 np=2 $(F)/dev/test/mpi_test_zero"
"mpi name=zero-clang-2 np=2 $(C)/dev/test/mpi_test_zero --quick"
"run name=zero-modes dev/test/same_bits.sh $(B)/dev/test/mpi_test_zero"
"mpi name=ranks-1 np=1 $(B)/dev/test/mpi_test_ranks $(SHARDS) build/test-logs"
$(foreach n,2 3 4,"mpi name=ranks-$(n) np=$(n) $(B)/dev/test/mpi_test_ranks $(SHARDS) build/test-logs")
$(foreach n,2 3,"mpi name=checkpoint-bf16-$(n) np=$(n) $(B)/dev/test/mpi_test_checkpoint all build/test-logs/checkpoint-$(n)")
"mpi name=train-asan np=2 timeout=600 $(ASAN_RUN) $(A)/train_gpt $(THREE_STEPS) --out build/test-logs/asan"
"mpi name=train-tsan np=2 timeout=900 $(TSAN_RUN) $(T)/train_gpt $(THREE_STEPS) --save-every 1 --save-mode async --keep 1 --out build/test-logs/tsan"
"run name=gpu-check-on-this-cpu timeout=600 bash dev/gpu/check.sh --host --out build/test-logs/gpu-check"
"pytest timeout=1500 dev/test"
endef

define SUITES_LONG
"run name=tiny-beats-bigram timeout=600 $(PYTHON) dev/test/tiny_beats_bigram.py"
$(foreach n,1 4 5,"mpi name=checkpoint-bf16-$(n) np=$(n) $(B)/dev/test/mpi_test_checkpoint all build/test-logs/checkpoint-$(n)")
"mpi name=checkpoint-async np=2 HOSTCUDA_ASYNC=1 $(B)/dev/test/mpi_test_checkpoint all build/test-logs/checkpoint-async"
"mpi name=checkpoint-protect np=3 HOSTCUDA_PROTECT=1 $(B)/dev/test/mpi_test_checkpoint all build/test-logs/checkpoint-protect"
"mpi name=checkpoint-fp32-2 np=2 $(F)/dev/test/mpi_test_checkpoint all build/test-logs/checkpoint-fp32-2"
"run name=resume-matrix timeout=1800 $(PYTHON) dev/test/resume_matrix.py"
"run name=checkpoint-faults timeout=3600 $(PYTHON) dev/test/checkpoint_faults.py"
"run name=zero-modes-all timeout=900 dev/test/same_bits.sh $(B)/dev/test/mpi_test_zero all"
$(foreach s,3 4 5,"gtest name=kernels-schedule-$(s) HOSTCUDA_SCHEDULE=$(s) $(B)/kernel_tests")
"gtest name=kernels-fp32-schedule HOSTCUDA_SCHEDULE=6 $(F)/kernel_tests"
$(foreach a,80 89,"gtest name=attention-long-sm_$(a) timeout=600 LLMC_LONG_TESTS=1 HOSTCUDA_ARCH=$(a) $(B)/kernel_tests --gtest_filter=EveryCombination*")
$(foreach t,$(notdir $(HOSTCUDA_TESTS)),"gtest name=hostcuda-$(t)-asan timeout=900 $(ASAN_RUN) build/host-asan/hostcuda/test/$(t)")
$(foreach t,$(filter test_execution% test_runtime%,$(notdir $(HOSTCUDA_TESTS))),"gtest name=hostcuda-$(t)-tsan timeout=900 $(TSAN_RUN) build/host-tsan/hostcuda/test/$(t)")
$(foreach t,$(notdir $(HOST_TESTS)),"gtest name=$(t)-asan $(ASAN_RUN) build/host-asan/dev/test/$(t)")
"run name=nccl-asan $(ASAN_RUN) build/host-asan/hostcuda/test/mpi_test_nccl"
$(foreach n,1 4 5 6 7,"mpi name=zero-bf16-$(n) np=$(n) $(B)/dev/test/mpi_test_zero")
$(foreach n,1 3 5,"mpi name=accounts-$(n) np=$(n) $(B)/dev/test/mpi_test_accounts")
$(foreach n,1 3 5,"mpi name=zero-fp32-$(n) np=$(n) $(F)/dev/test/mpi_test_zero")
"run name=bench-fp32 $(F)/bench"
"run name=bench-clang $(C)/bench"
"run name=bench-async HOSTCUDA_ASYNC=1 $(B)/bench"
"run name=bench-protect HOSTCUDA_PROTECT=1 $(B)/bench"
"mpi name=ranks-6 np=6 $(B)/dev/test/mpi_test_ranks $(SHARDS) build/test-logs"
endef

# Where nvcc is: what can be said of the GPU build without a GPU.
define SUITES_CUDA
"run name=cuda-build timeout=1200 bash dev/test/check_cuda_build.sh"
"run name=gpu-pack timeout=1200 bash dev/gpu/pack.sh"
"run name=gpu-pack-starts timeout=300 bash dev/test/check_pack.sh"
endef

.PHONY: build-tests build-long-tests
build-tests:
	$(MAKE) DEVICE=cpu PRECISION=BF16 train_gpt test_gpt bench kernel-tests mpi-tests host-tests hostcuda-tests
	$(MAKE) DEVICE=cpu PRECISION=FP32 programs kernel-tests $(F)/dev/test/mpi_test_zero
	NVCC= $(MAKE) PRECISION=BF16 CXX=clang++ programs kernel-tests $(C)/dev/test/mpi_test_zero
	$(MAKE) DEVICE=cpu PRECISION=BF16 ASAN=1 $(A)/train_gpt kernel-tests
	$(MAKE) DEVICE=cpu PRECISION=BF16 TSAN=1 $(T)/train_gpt kernel-tests
build-long-tests: build-tests
	$(MAKE) DEVICE=cpu PRECISION=FP32 $(F)/bench $(F)/dev/test/mpi_test_checkpoint
	NVCC= $(MAKE) PRECISION=BF16 CXX=clang++ $(C)/bench
	$(MAKE) DEVICE=cpu ASAN=1 host-tests hostcuda-tests
	$(MAKE) DEVICE=cpu TSAN=1 hostcuda-tests

test-cuda:
	@$(PYTHON) dev/test/run_tests.py $(strip $(SUITES_CUDA))
test: build-tests
	@$(PYTHON) dev/test/run_tests.py $(strip $(SUITES_TEST))
test-long: build-long-tests
	@$(PYTHON) dev/test/run_tests.py $(strip $(SUITES_TEST)) $(strip $(SUITES_LONG))

clean:
	rm -rf build train_gpt test_gpt bench

.SECONDARY:
-include $(shell find build -name '*.d' 2>/dev/null)
