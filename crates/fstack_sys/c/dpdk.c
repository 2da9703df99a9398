/* DPDK's inline functions, as functions: their names begin with innet_ instead of rte_. */

#include <stdio.h>

#include <rte_ethdev.h>
#include <rte_log.h>
#include <rte_mbuf.h>
#include <rte_prefetch.h>

/* As src/dpdk.rs has it. */
struct innet_frame {
    void *data;
    uint16_t bytes;
    uint16_t segments;
};

uint16_t innet_eth_tx_burst(uint16_t port, uint16_t queue, struct rte_mbuf **packets, uint16_t count)
{
    return rte_eth_tx_burst(port, queue, packets, count);
}

/* First segment of each packet, prefetched, as it will be read soon. */
static void frames_of(struct rte_mbuf *const *packets, struct innet_frame *frames, unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        frames[i].data = rte_pktmbuf_mtod(packets[i], void *);
        frames[i].bytes = rte_pktmbuf_data_len(packets[i]);
        frames[i].segments = packets[i]->nb_segs;
        rte_prefetch0(frames[i].data);
    }
}

uint16_t innet_eth_rx_frames(uint16_t port, uint16_t queue, struct rte_mbuf **packets, struct innet_frame *frames,
                             uint16_t count)
{
    const uint16_t taken = rte_eth_rx_burst(port, queue, packets, count);
    frames_of(packets, frames, taken);
    return taken;
}

int innet_pktmbuf_alloc_frames(struct rte_mempool *pool, struct rte_mbuf **packets, struct innet_frame *frames,
                               unsigned count)
{
    const int failed = rte_pktmbuf_alloc_bulk(pool, packets, count);
    if (!failed)
        frames_of(packets, frames, count);
    return failed;
}

/* The queues are equal, without offloads; with several of them a device that can hash spreads flows over them.
 * rte_eth_conf is a structure of a thousand bytes whose layout changes between releases. */
int innet_eth_open(uint16_t port, uint16_t queues, uint16_t receive_slots, uint16_t send_slots,
                   struct rte_mempool *pool)
{
    const int socket = rte_eth_dev_socket_id(port);
    struct rte_eth_conf plain = {0};
    struct rte_eth_dev_info device;
    int failed = rte_eth_dev_info_get(port, &device);
    if (failed)
        return failed;
    const uint64_t flows = device.flow_type_rss_offloads & (RTE_ETH_RSS_IP | RTE_ETH_RSS_UDP);
    if (queues > 1 && flows) {
        plain.rxmode.mq_mode = RTE_ETH_MQ_RX_RSS;
        plain.rx_adv_conf.rss_conf.rss_hf = flows;
    }
    failed = rte_eth_dev_configure(port, queues, queues, &plain);
    if (!failed)
        failed = rte_eth_dev_adjust_nb_rx_tx_desc(port, &receive_slots, &send_slots);
    for (uint16_t queue = 0; !failed && queue < queues; queue++) {
        failed = rte_eth_rx_queue_setup(port, queue, receive_slots, socket, NULL, pool);
        if (!failed)
            failed = rte_eth_tx_queue_setup(port, queue, send_slots, socket, NULL);
    }
    return failed ? failed : rte_eth_dev_start(port);
}

int innet_eth_max_queues(uint16_t port)
{
    struct rte_eth_dev_info device;
    const int failed = rte_eth_dev_info_get(port, &device);
    return failed ? failed : RTE_MIN(device.max_rx_queues, device.max_tx_queues);
}

int innet_eth_link_is_up(uint16_t port)
{
    struct rte_eth_link link = {0};
    const int failed = rte_eth_link_get_nowait(port, &link);
    return failed ? failed : link.link_status == RTE_ETH_LINK_UP;
}

/* Standard output is the program's own. */
int innet_log_to_stderr(void)
{
    return rte_openlog_stream(stderr);
}

void innet_pktmbuf_free_bulk(struct rte_mbuf **packets, unsigned count)
{
    rte_pktmbuf_free_bulk(packets, count);
}

void innet_pktmbuf_set_lengths(struct rte_mbuf *const *packets, const uint16_t *bytes, unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        if (bytes[i]) {
            packets[i]->data_len = bytes[i];
            packets[i]->pkt_len = bytes[i];
        }
    }
}

int innet_errno(void)
{
    return rte_errno;
}
