// NVML's library with made-up counters, for the tests: two GPUs of 250 W, which compute half of the time.
//
// The counters were not recorded on a GPU. The functions, their types and units are NVML's.
#include <cstdint>
#include <cstring>

namespace {
constexpr int kNotFound = 6, kNotSupported = 3, kGpuIsLost = 15;
std::uint64_t readings[4];
int gpus[4] = {0, 1, 2, 3};
}  // namespace

extern "C" {
int nvmlInitWithFlags(unsigned) { return 0; }
int nvmlShutdown() { return 0; }
const char *nvmlErrorString(int code) {
    return code == kNotSupported ? "Not Supported" : code == kGpuIsLost ? "GPU is lost" : "Not Found";
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    for (int index = 0; index < 4; ++index) {
        const char names[4][7] = {"GPU-00", "GPU-01", "MIG-02", "GPU-03"};
        if (std::strcmp(uuid, names[index]) == 0) {
            *device = &gpus[index];
            return 0;
        }
    }
    return kNotFound;
}

// Millijoules since the driver was loaded: 500 J more at each reading. An instance of MIG has no such counter, and
// every second reading of the last GPU fails.
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    const int index = *static_cast<int *>(device);
    if (index == 2) return kNotSupported;
    if (index == 3 && readings[3] % 2) return readings[3]++, kGpuIsLost;
    *millijoules = 7'000'000ULL + 500'000ULL * readings[index]++;
    return 0;
}

struct Utilization {
    unsigned gpu, memory;
};

int nvmlDeviceGetUtilizationRates(void *device, Utilization *rates) {
    if (*static_cast<int *>(device) == 3) return kGpuIsLost;
    rates->gpu = *static_cast<int *>(device) == 0 ? 40 : 60;
    rates->memory = 10;
    return 0;
}
}
