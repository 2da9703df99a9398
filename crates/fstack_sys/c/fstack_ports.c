/* DPDK's headers against the part of DPDK in src/fstack.rs, for tests/fstack_layout.rs. */

#include <stddef.h>
#include <stdint.h>

#include <rte_cycles.h>
#include <rte_ethdev.h>

const size_t innet_eth_link_layout[] = {
    sizeof(struct rte_eth_link),
    _Alignof(struct rte_eth_link),
    offsetof(struct rte_eth_link, link_speed),
};

/* Bit fields have no offset: links in these states are. */
const struct rte_eth_link innet_link_up = {.link_speed = 10, .link_status = RTE_ETH_LINK_UP};
const struct rte_eth_link innet_link_down = {
    .link_speed = 10, .link_duplex = RTE_ETH_LINK_FULL_DUPLEX, .link_autoneg = RTE_ETH_LINK_AUTONEG,
};

#define DECLARED(function, type) \
    _Static_assert(__builtin_types_compatible_p(__typeof__(function), type), #function " is not as src/fstack.rs has it")

DECLARED(rte_delay_us_callback_register, void(void (*)(unsigned)));
DECLARED(rte_delay_us_block, void(unsigned));
DECLARED(rte_eth_dev_count_avail, uint16_t(void));
DECLARED(rte_eth_dev_get_port_by_name, int(const char *, uint16_t *));
DECLARED(rte_eth_link_get_nowait, int(uint16_t, struct rte_eth_link *));
DECLARED(rte_eth_dev_start, int(uint16_t));
DECLARED(rte_eth_dev_stop, int(uint16_t));
