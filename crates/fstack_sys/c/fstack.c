/* What F-Stack keeps in structures of its own, whose layout changes between releases: the installed header says it. */

#include <stdint.h>
#include <sys/types.h>

#include "ff_config.h"

/* Checksums are left to the first port. Only the first: the size of a port's entry depends on how F-Stack was built. */
void innet_ff_no_checksums_on_first_port(void)
{
    struct ff_hw_features *features = &ff_global_cfg.dpdk.port_cfgs[0].hw_features;
    features->rx_csum = 1;
    features->tx_csum_ip = 1;
    features->tx_csum_l4 = 1;
}
