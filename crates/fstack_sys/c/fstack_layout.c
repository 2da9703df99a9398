/* What the headers of the installed F-Stack say, for tests/fstack_layout.rs. */

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
    EVFILT_READ, EVFILT_WRITE, EV_ADD, EV_DELETE, EV_ONESHOT, EV_CLEAR, EV_EOF, EV_ERROR, AF_INET6_LINUX, DPDK_CONFIG_NUM,
};

/* The compiler checks the types of the functions that the bindings use: a header that declares another one fails. */
int (*const innet_ff_kevent)(int, const struct kevent *, int, struct kevent *, int, const struct timespec *) = ff_kevent;
int (*const innet_ff_accept)(int, struct linux_sockaddr *, socklen_t *) = ff_accept;
int (*const innet_ff_connect)(int, const struct linux_sockaddr *, socklen_t) = ff_connect;
int (*const innet_ff_setsockopt)(int, int, int, const void *, socklen_t) = ff_setsockopt;
int (*const innet_ff_getsockopt)(int, int, int, void *, socklen_t *) = ff_getsockopt;
int (*const innet_ff_ioctl)(int, unsigned long, ...) = ff_ioctl;
ssize_t (*const innet_ff_read)(int, void *, size_t) = ff_read;
ssize_t (*const innet_ff_writev)(int, const struct iovec *, int) = ff_writev;
void (*const innet_ff_run)(int (*)(void *), void *) = ff_run;
