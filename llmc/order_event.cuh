// An event that orders two streams and carries no time.
#pragma once

#include "llmc/device.cuh"

class OrderEvent {
public:
    OrderEvent() { CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
    OrderEvent(const OrderEvent&) = delete;
    OrderEvent& operator=(const OrderEvent&) = delete;
    ~OrderEvent() { cudaEventDestroy(event_); }
    void record(cudaStream_t stream) { CUDA_CHECK(cudaEventRecord(event_, stream)); }
    void wait(cudaStream_t stream) { CUDA_CHECK(cudaStreamWaitEvent(stream, event_, 0)); }  // no-op if never recorded

private:
    cudaEvent_t event_ = nullptr;
};
