/* What F-Stack itself takes for a request and its reply: a client and a server of nothing but its calls.
 *
 *     cc -O2 -fPIC -I"$FF_PATH/include" $(pkg-config --cflags libdpdk) fstack_floor.c ../../fstack_sys/c/fstack.c -o fstack_floor \
 *         -L"$FF_PATH/lib" -Wl,-rpath,"$FF_PATH/lib" -lfstack $(pkg-config --libs libdpdk)
 *     ./fstack_floor server server.ini 64 64 0     --no-pci --vdev=net_memif0,role=server,mac=02:00:00:00:00:02,socket=PATH &
 *     ./fstack_floor client client.ini 64 64 40000 --no-pci --vdev=net_memif0,role=client,mac=02:00:00:00:00:01,socket=PATH
 *
 * (-fPIC, or the program has a dpdk_argc of its own beside a shared libfstack's). The arguments: the end, F-Stack's
 * configuration (as docs/how-to/fstack.md has one; the server at 10.8.0.2 on core 0, the client at 10.8.0.1 on core 1), bytes of a request
 * and of a reply, requests, and arguments for DPDK. The client prints p50 and p99 of the time from a request's first
 * byte to its reply's last, leaving out the first tenth; the server runs until it is killed. With SEGMENTS in the
 * environment of both ends, and bsize=65535,rsize=7 in both devices, whole segments go through the memif.
 */

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>

#include <ff_api.h>
#include <ff_config.h>
#include <ff_event.h>

/* The steps of ff_init, which no header declares: between the first two, DPDK's arguments are added. */
int ff_dpdk_init(int argc, char **argv);
int ff_freebsd_init(void);
int ff_dpdk_if_up(void);

/* Of crates/fstack_sys/c/fstack.c. */
int innet_ff_whole_segments(void);

/* A turn writes no more than the reactor's does. */
enum { PORT = 7711, MOST = 32, SHARE = 64 << 10 };

static bool server;
static size_t in_bytes, out_bytes; /* Of a message that is received, and of one that is sent. */
static size_t received, unsent;
static bool waits; /* For room to write. */
static char *buffer;
static int queue, listener, peer;
static long count, done;
static double begun, *times;

static double microseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e6 + now.tv_nsec / 1e3;
}

static void watch(int socket, short filter, unsigned short flags)
{
    struct kevent change;
    EV_SET(&change, socket, filter, EV_ADD | flags, 0, 0, NULL);
    ff_kevent(queue, &change, 1, NULL, 0, NULL);
}

static void prepare(int socket)
{
    int on = 1;
    ff_ioctl(socket, FIONBIO, &on);
    ff_setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

static void send_rest(void)
{
    const ssize_t sent = ff_write(peer, buffer + out_bytes - unsent, unsent < SHARE ? unsent : SHARE);
    if (sent > 0)
        unsent -= sent;
    else
        watch(peer, EVFILT_WRITE, EV_ONESHOT);
    waits = sent <= 0;
}

static void send_message(void)
{
    begun = microseconds();
    unsent = out_bytes;
    send_rest();
}

static void take_message(void)
{
    if (!server) {
        times[done++] = microseconds() - begun;
        if (done == count) {
            ff_stop_run();
            return;
        }
    }
    send_message();
}

static void receive(void)
{
    for (;;) {
        const size_t wanted = in_bytes - received;
        const ssize_t taken = ff_read(peer, buffer + received, wanted);
        if (taken <= 0)
            return;
        received += taken;
        if (received == in_bytes) {
            received = 0;
            take_message();
        }
        /* There is no more: the next bytes are an event. */
        if ((size_t)taken < wanted)
            return;
    }
}

static int turn(void *unused)
{
    (void)unused;
    struct kevent events[MOST];
    if (unsent && !waits)
        send_rest();
    const int ready = ff_kevent(queue, NULL, 0, events, MOST, NULL);
    for (int i = 0; i < ready; i++) {
        if (server && (int)events[i].ident == listener) {
            peer = ff_accept(listener, NULL, NULL);
            prepare(peer);
            watch(peer, EVFILT_READ, EV_CLEAR);
        } else if (events[i].filter == EVFILT_READ) {
            receive();
        } else if (unsent) {
            send_rest();
        } else { /* Connected. */
            watch(peer, EVFILT_READ, EV_CLEAR);
            send_message();
        }
    }
    return 0;
}

static void begin(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(PORT)};
    inet_pton(AF_INET, "10.8.0.2", &address.sin_addr);
    const struct linux_sockaddr *const there = (const void *)&address;
    const int opened = ff_socket(AF_INET, SOCK_STREAM, 0);
    prepare(opened);
    queue = ff_kqueue();
    if (server) {
        listener = opened;
        ff_bind(listener, there, sizeof address);
        ff_listen(listener, 1);
        watch(listener, EVFILT_READ, 0);
    } else {
        peer = opened;
        ff_connect(peer, there, sizeof address);
        watch(peer, EVFILT_WRITE, EV_ONESHOT);
    }
}

static int ascending(const void *left, const void *right)
{
    const double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

int main(int argc, char **argv)
{
    if (argc < 6) {
        fprintf(stderr, "%s server|client CONFIG REQUEST REPLY COUNT [ARGUMENT FOR DPDK ...]\n", argv[0]);
        return 2;
    }
    server = !strcmp(argv[1], "server");
    const size_t request = strtoul(argv[3], NULL, 10), reply = strtoul(argv[4], NULL, 10);
    in_bytes = server ? request : reply;
    out_bytes = server ? reply : request;
    count = strtol(argv[5], NULL, 10);
    times = calloc(count + 1, sizeof *times);
    const size_t longest = request > reply ? request : reply;
    /* Pages of its own: those that nobody has written are all the same one. */
    buffer = memset(malloc(longest), 1, longest);

    char *const own[] = {argv[0], "--conf", argv[2], "--proc-type=primary", "--proc-id=0"};
    if (ff_load_config(5, own) < 0)
        return 1;
    char *arguments[DPDK_CONFIG_NUM + MOST] = {0};
    int given = 0;
    for (; given < dpdk_argc; given++)
        arguments[given] = dpdk_argv[given];
    for (int i = 6; i < argc && i < 6 + MOST - 1; i++)
        arguments[given++] = argv[i];
    if (ff_dpdk_init(given, arguments) < 0 || (getenv("SEGMENTS") && innet_ff_whole_segments() < 0) ||
        ff_freebsd_init() < 0 || ff_dpdk_if_up() < 0)
        return 1;
    begin();
    ff_run(turn, NULL);

    const long first = count / 10, kept = count - first;
    qsort(times + first, kept, sizeof *times, ascending);
    fprintf(stderr, "%zu B, %zu B: p50 %.2f us, p99 %.2f us\n", request, reply, times[first + kept / 2],
            times[first + kept * 99 / 100]);
    return 0;
}
