/* Access to F-Stack's structures, whose layout changes between releases, and to DPDK's inline functions, by the installed headers. */

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>

#include <rte_errno.h>
#include <rte_ethdev.h>
#include <rte_mbuf.h>
#include <rte_memcpy.h>

#include "ff_config.h"

/* At least a burst, which the driver copies before it returns. A pool is smallest with a power of two less one. */
enum { WHOLE_FRAMES = 2 * MAX_PKT_BURST - 1 };

/* Most bytes of optional fields in a port's entry: IPv6 and ipfw have 72. */
enum { MOST_OPTIONS = 128 };

/* Frames of several parts become frames of one. */
static uint16_t join_parts(uint16_t port, uint16_t queue, struct rte_mbuf *frames[], uint16_t count, void *pool)
{
    (void)port;
    (void)queue;
    for (uint16_t i = 0; i < count; i++) {
        struct rte_mbuf *const parts = frames[i];
        const int fits = parts->nb_segs > 1 && parts->pkt_len <= UINT16_MAX;
        struct rte_mbuf *const whole = fits ? rte_pktmbuf_alloc(pool) : NULL;
        if (!whole)
            continue;
        whole->data_off = 0;
        char *end = rte_pktmbuf_mtod(whole, char *);
        for (const struct rte_mbuf *part = parts; part; part = part->next) {
            rte_memcpy(end, rte_pktmbuf_mtod(part, char *), part->data_len);
            end += part->data_len;
        }
        whole->data_len = parts->pkt_len;
        whole->pkt_len = parts->pkt_len;
        rte_pktmbuf_free(parts);
        frames[i] = whole;
    }
    return count;
}

/* The entry of a port, in a table of entries of this size. */
static struct ff_port_cfg *entry_of(uint16_t port, size_t size)
{
    return (struct ff_port_cfg *)((char *)ff_global_cfg.dpdk.port_cfgs + port * size);
}

/* The size of an entry depends on how F-Stack was built: it is the one by which every port has its own address in its entry. */
static size_t entry_size(uint16_t ports)
{
    for (size_t size = sizeof(struct ff_port_cfg); size <= sizeof(struct ff_port_cfg) + MOST_OPTIONS; size += sizeof(void *)) {
        uint16_t port = 0;
        for (; port < ports; port++) {
            struct rte_ether_addr address;
            const struct ff_port_cfg *const entry = entry_of(port, size);
            if (rte_eth_macaddr_get(port, &address) || entry->port_id != port ||
                memcmp(entry->mac, address.addr_bytes, sizeof entry->mac))
                break;
        }
        if (port == ports)
            return size;
    }
    return 0;
}

int innet_ff_whole_segments(void)
{
    const uint16_t ports = rte_eth_dev_count_avail();
    const size_t size = entry_size(ports);
    if (!size)
        return -ENOENT;
    struct rte_mempool *const pool =
        rte_pktmbuf_pool_create("innet_segments", WHOLE_FRAMES, 0, 0, UINT16_MAX, SOCKET_ID_ANY);
    if (!pool)
        return -rte_errno;
    for (uint16_t port = 0; port < ports; port++) {
        if (!rte_eth_add_tx_callback(port, 0, join_parts, pool))
            return -rte_errno;
        struct ff_hw_features *const features = &entry_of(port, size)->hw_features;
        features->rx_csum = 1;
        features->tx_csum_ip = 1;
        features->tx_csum_l4 = 1;
        features->tx_tso = 1;
    }
    return 0;
}
