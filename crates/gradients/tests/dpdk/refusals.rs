//! Invalid configurations are refused, with advice.

use gradients::dpdk::DpdkTransport;
use gradients::{AggregatorLimits, DpdkConfig, dpdk_aggregators};

use crate::setup::*;

fn refusal(config: &DpdkConfig) -> String {
    let refused = dpdk_aggregators(config, AggregatorLimits::default());
    refused.err().expect("it is refused").to_string()
}

fn good() -> DpdkConfig {
    config("10.8.9.1", &[format!("net_null{}", number())])
}

#[test]
fn invalid_settings_are_named() {
    let _alone = alone();
    drop(start(&good()));
    let with = |change: fn(&mut DpdkConfig)| {
        let mut config = good();
        change(&mut config);
        refusal(&config)
    };
    let none = with(|config| config.devices.clear());
    assert!(none.contains("net_af_packet0,iface="), "{none}");
    let nowhere = with(|config| config.devices = vec!["net_af_packet99,iface=nowhere".into()]);
    assert!(nowhere.contains("iface=nowhere"), "{nowhere}");
    let unknown = with(|config| config.devices = vec!["net_no_such_driver0".into()]);
    assert!(unknown.contains("net_no_such_driver0"), "{unknown}");
    let address = with(|config| config.address.set_ip([0, 0, 0, 0].into()));
    assert!(address.contains("10.0.0.2/24"), "{address}");
    assert!(with(|config| config.address.set_port(0)).contains("UDP port"));
    assert!(with(|config| config.prefix = 33).contains("/33"));
    assert!(with(|config| config.threads = 0).contains("0 threads"));
    assert!(with(|config| config.cores = vec![100_000]).contains("core 100000"));
    let other = with(|config| config.eal.push("--no-hpet".into()));
    assert!(other.contains("once in a process"), "{other}");
}

#[test]
fn a_device_has_one_user_at_a_time() {
    let _alone = alone();
    let config = good();
    let first = start(&config);
    assert!(refusal(&config).contains("in use"));
    drop(first);
    drop(start(&config));
    let two = DpdkConfig { devices: vec!["net_null90".into(), "net_null91".into()], ..good() };
    let error = DpdkTransport::open(&two).err().unwrap().to_string();
    assert!(error.contains("a worker has one device"), "{error}");
}
