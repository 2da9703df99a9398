//! DPDK at one end of a veth pair (af_packet), the kernel at the other: its ARP, its checksums, its sockets.

use std::net::SocketAddr;

use gradients::ethernet::{Arp, HeaderTemplate, MAX_FRAME};
use gradients::packet::{PacketHeader, PacketKind};
use gradients::{AggregatorLimits, DpdkConfig, JoinJob, ParentAggregator, dpdk_aggregators, udp_aggregators};

use crate::setup::*;

const KERNEL: &str = "10.9.0.1";
const DPDK: &str = "10.9.0.2";

fn address() {
    shell(&format!("ip address add {KERNEL}/24 dev a0")).unwrap();
}

fn dpdk() -> DpdkConfig {
    config(DPDK, &[af_packet("a1")])
}

#[test]
fn udp_workers_sum_at_a_dpdk_aggregator() {
    with_veth(&["a"], || {
        address();
        let aggregator = start(&dpdk());
        let join = |number| {
            let request = request("job", number, 3);
            let ticket = aggregator.join(&request, None).unwrap();
            work(None, &request, &ticket)
        };
        sum_all((0..3).map(join).collect(), 3, 40_000);
        let aggregator = aggregator.aggregator();
        let (counters, frames) = (aggregator.counters(), aggregator.frames.unwrap());
        assert_eq!(counters.counted, 3 * counters.sums);
        assert_eq!((counters.malformed, frames.broken, frames.forwarded), (0, 0, 0));
    });
}

#[test]
fn a_dpdk_worker_and_a_udp_worker_sum_at_a_udp_aggregator() {
    with_veth(&["a"], || {
        address();
        let at: SocketAddr = format!("{KERNEL}:{PORT}").parse().unwrap();
        let aggregator = udp_aggregators(at, 1, AggregatorLimits::default()).unwrap().remove(0);
        let tickets = [0, 1].map(|number| aggregator.join(&request("job", number, 2), None).unwrap());
        let workers = vec![
            work(None, &request("job", 0, 2), &tickets[0]),
            work(Some(&dpdk()), &request("job", 1, 2), &tickets[1]),
        ];
        sum_all(workers, 3, 40_000);
    });
}

#[test]
fn a_dpdk_aggregator_sums_with_a_udp_parent() {
    with_veth(&["a"], || {
        address();
        let at: SocketAddr = format!("{KERNEL}:{PORT}").parse().unwrap();
        let parent = udp_aggregators(at, 1, AggregatorLimits::default()).unwrap().remove(0);
        // Datagrams of the parent arrive at the first core, and are for a job on the third.
        let three = DpdkConfig { threads: 3, ..dpdk() };
        let children = dpdk_aggregators(&three, AggregatorLimits::default()).unwrap();
        let child = &children[2];
        let of_three = |number| JoinJob { world: 3, ..request("job", number, 2) };
        let up = parent.join(&JoinJob { below: Some(2), ..of_three(0) }, None).unwrap();
        let mut upstream = Some(ParentAggregator::new(&up, 2));
        let mut join = |number| {
            let request = of_three(number);
            let ticket = child.join(&request, upstream.take()).unwrap();
            work(None, &request, &ticket)
        };
        let mut workers: Vec<_> = (0..2).map(&mut join).collect();
        // The third worker joins the parent itself, as a rack of one.
        let own = JoinJob { below: Some(1), ..of_three(1) };
        let ticket = parent.join(&own, None).unwrap();
        workers.push(work(None, &own, &ticket));
        sum_all(workers, 3, 20_000);
        let counters = parent.aggregator().counters();
        assert_eq!(counters.counted, 2 * counters.sums);
    });
}

#[test]
fn an_unknown_neighbour_is_requested_by_arp() {
    with_veth(&["a"], || {
        address();
        let aggregator = start(&dpdk());
        // The kernel knows the aggregator's address, so it sends no request.
        let mac = ask_for(DPDK);
        let mac: Vec<String> = mac.iter().map(|byte| format!("{byte:02x}")).collect();
        shell(&format!("ip neighbour replace {DPDK} lladdr {} dev a0 nud permanent", mac.join(":"))).unwrap();
        let request = request("job", 0, 1);
        let ticket = aggregator.join(&request, None).unwrap();
        sum_all(vec![work(None, &request, &ticket)], 1, 1000);
        assert!(aggregator.aggregator().frames.unwrap().unresolved > 0);
    });
}

/// Ethernet address of `ip`, requested by ARP from an address that is not used again.
fn ask_for(ip: &str) -> [u8; 6] {
    let raw = Raw::open("a0");
    let mut room = [0; MAX_FRAME];
    let mac = [2, 0, 0, 0, 0, 77];
    let request =
        Arp { is_request: true, from: ("10.9.0.77".parse().unwrap(), mac), to: (ip.parse().unwrap(), [0; 6]) };
    let bytes = request.write(&mut room);
    raw.send(&room[..bytes]);
    loop {
        let frame = raw.receive();
        if frame[..6] == mac {
            assert_eq!(frame[20..22], [0, 2]);
            return frame[6..12].try_into().unwrap();
        }
    }
}

#[test]
fn damaged_frames_are_dropped_and_counted() {
    with_veth(&["a"], || {
        let aggregator = start(&dpdk());
        let mac = ask_for(DPDK);
        let from = (format!("10.9.0.77:{PORT}").parse().unwrap(), [2, 0, 0, 0, 0, 77]);
        let to = (format!("{DPDK}:{PORT}").parse().unwrap(), mac);
        let mut room = [0; MAX_FRAME];
        let header = PacketHeader::new(PacketKind::Float, 1, 1, 0).encode();
        let bytes = HeaderTemplate::new(from, to).write(&mut room, &header, &[0; 8]).unwrap();
        let raw = Raw::open("a0");
        let good = &room[..bytes];
        let broken = |at: usize| {
            let mut frame = good.to_vec();
            frame[at] ^= 0x10;
            frame
        };
        // Data, checksums, lengths. (The kernel does not pass fragments on.)
        let damaged = [45, 58, 40, 24, 17, 39];
        damaged.iter().for_each(|&at| raw.send(&broken(at)));
        raw.send(&good[..50]);
        raw.send(good);
        until("the last frame", || aggregator.aggregator().counters().received > 0);
        let counters = aggregator.aggregator().counters();
        assert_eq!((counters.received, counters.strangers), (1, 1));
        until("the count", || aggregator.aggregator().frames.unwrap().broken == damaged.len() as u64 + 1);
    });
}
