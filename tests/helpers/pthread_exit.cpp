// pthread_exit that names a call of innet_drl: it would unwind the call's frames. For LD_PRELOAD.
#include <dlfcn.h>
#include <execinfo.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

extern "C" [[noreturn]] void pthread_exit(void *result) {
    void *frames[200];
    const int count = backtrace(frames, 200);
    for (int i = 0; i < count; i++) {
        Dl_info found;
        if (dladdr(frames[i], &found) && found.dli_fname && strstr(found.dli_fname, "innet_drl/_core")) {
            const char text[] = "pthread_exit in a call of innet_drl\n";
            if (write(2, text, sizeof text - 1) < 0) {}
            _exit(97);
        }
    }
    using Exit = void (*)(void *);
    reinterpret_cast<Exit>(dlsym(RTLD_NEXT, "pthread_exit"))(result);
    abort();
}
