/* DPDK's inline functions, as functions. Names begin with innet_ in place of rte_. */

#include <rte_ethdev.h>
#include <rte_mbuf.h>

uint16_t innet_eth_rx_burst(uint16_t port, uint16_t queue, struct rte_mbuf **packets, uint16_t count)
{
    return rte_eth_rx_burst(port, queue, packets, count);
}

uint16_t innet_eth_tx_burst(uint16_t port, uint16_t queue, struct rte_mbuf **packets, uint16_t count)
{
    return rte_eth_tx_burst(port, queue, packets, count);
}

/* One receive and one send queue, without offloads: rte_eth_conf is a structure of a thousand bytes whose layout
 * changes between releases. */
int innet_eth_open(uint16_t port, uint16_t receive_slots, uint16_t send_slots, struct rte_mempool *pool)
{
    const struct rte_eth_conf plain = {0};
    const int socket = rte_eth_dev_socket_id(port);
    int failed = rte_eth_dev_configure(port, 1, 1, &plain);
    if (!failed)
        failed = rte_eth_dev_adjust_nb_rx_tx_desc(port, &receive_slots, &send_slots);
    if (!failed)
        failed = rte_eth_rx_queue_setup(port, 0, receive_slots, socket, NULL, pool);
    if (!failed)
        failed = rte_eth_tx_queue_setup(port, 0, send_slots, socket, NULL);
    return failed ? failed : rte_eth_dev_start(port);
}

int innet_pktmbuf_alloc_bulk(struct rte_mempool *pool, struct rte_mbuf **packets, unsigned count)
{
    return rte_pktmbuf_alloc_bulk(pool, packets, count);
}

void innet_pktmbuf_free_bulk(struct rte_mbuf **packets, unsigned count)
{
    rte_pktmbuf_free_bulk(packets, count);
}

void *innet_pktmbuf_data(const struct rte_mbuf *packet)
{
    return rte_pktmbuf_mtod(packet, void *);
}

uint16_t innet_pktmbuf_data_len(const struct rte_mbuf *packet)
{
    return rte_pktmbuf_data_len(packet);
}

uint16_t innet_pktmbuf_room(const struct rte_mbuf *packet)
{
    return rte_pktmbuf_data_len(packet) + rte_pktmbuf_tailroom(packet);
}

uint16_t innet_pktmbuf_segments(const struct rte_mbuf *packet)
{
    return packet->nb_segs;
}

void innet_pktmbuf_set_len(struct rte_mbuf *packet, uint16_t bytes)
{
    packet->data_len = bytes;
    packet->pkt_len = bytes;
}

int innet_errno(void)
{
    return rte_errno;
}
