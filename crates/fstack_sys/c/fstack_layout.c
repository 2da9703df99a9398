/* Layouts, constants and types in the headers of the installed F-Stack, for tests/fstack_layout.rs. */

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "ff_api.h"
#include "ff_config.h"

const size_t innet_kevent_layout[] = {
    sizeof(struct kevent),          _Alignof(struct kevent),        offsetof(struct kevent, ident),
    offsetof(struct kevent, filter), offsetof(struct kevent, flags), offsetof(struct kevent, fflags),
    offsetof(struct kevent, data),  offsetof(struct kevent, udata), offsetof(struct kevent, ext),
};

const size_t innet_sockaddr_layout[] = {
    sizeof(struct linux_sockaddr),
    _Alignof(struct linux_sockaddr),
    offsetof(struct linux_sockaddr, sa_family),
    offsetof(struct linux_sockaddr, sa_data),
};

const int32_t innet_fstack_constants[] = {
    EVFILT_READ, EVFILT_WRITE, EV_ADD, EV_ONESHOT, EV_CLEAR, EV_EOF, AF_INET6_LINUX, DPDK_CONFIG_NUM,
};

/* A header that declares another type than src/fstack.rs does not compile. */
#define DECLARED(function, type) \
    _Static_assert(__builtin_types_compatible_p(__typeof__(function), type), #function " is not as src/fstack.rs has it")

DECLARED(ff_load_config, int(int, char *const *));
DECLARED(ff_run, void(int (*)(void *), void *));
DECLARED(ff_stop_run, void(void));
DECLARED(ff_socket, int(int, int, int));
DECLARED(ff_ioctl, int(int, unsigned long, ...));
DECLARED(ff_setsockopt, int(int, int, int, const void *, socklen_t));
DECLARED(ff_getsockopt, int(int, int, int, void *, socklen_t *));
DECLARED(ff_bind, int(int, const struct linux_sockaddr *, socklen_t));
DECLARED(ff_listen, int(int, int));
DECLARED(ff_accept, int(int, struct linux_sockaddr *, socklen_t *));
DECLARED(ff_connect, int(int, const struct linux_sockaddr *, socklen_t));
DECLARED(ff_shutdown, int(int, int));
DECLARED(ff_close, int(int));
DECLARED(ff_read, ssize_t(int, void *, size_t));
DECLARED(ff_writev, ssize_t(int, const struct iovec *, int));
DECLARED(ff_kqueue, int(void));
DECLARED(ff_kevent, int(int, const struct kevent *, int, struct kevent *, int, const struct timespec *));
DECLARED(dpdk_argc, int);
DECLARED(dpdk_argv, char *[DPDK_CONFIG_NUM + 1]);
