/* What F-Stack keeps in structures of its own, whose layout changes between releases: the installed header says it. */

#include <stdint.h>
#include <sys/types.h>

#include "ff_config.h"

/* Checksums left to the first port, and segments of up to 64 KiB handed to it whole. Only the first: the size of a
 * port's entry depends on how F-Stack was built. */
void innet_ff_offload_first_port(void)
{
    struct ff_hw_features *features = &ff_global_cfg.dpdk.port_cfgs[0].hw_features;
    features->rx_csum = 1;
    features->tx_csum_ip = 1;
    features->tx_csum_l4 = 1;
    features->tx_tso = 1;
}
