//! DPDK at one end of a veth pair (af_packet), the kernel at the other: its ARP, its checksums, its sockets.

use std::net::SocketAddr;

use gradients::dpdk::frame::{Arp, MAX_FRAME, Route};
use gradients::dpdk::{DpdkConfig, DpdkPlane};
use gradients::packet::{Header, Kind};
use gradients::{JoinJob, Limits, UdpAggregator, Upstream};

use crate::setup::*;

const KERNEL: &str = "10.9.0.1";
const DPDK: &str = "10.9.0.2";

fn address() {
    shell(&format!("ip address add {KERNEL}/24 dev a0")).unwrap();
}

fn dpdk() -> DpdkConfig {
    station(DPDK, &[af_packet("a1")])
}

#[test]
fn workers_of_the_kernel_sum_at_an_aggregator_on_dpdk() {
    with_veth(&["a"], || {
        address();
        let aggregator = start(&dpdk());
        let join = |number| {
            let request = request("job", number, 3);
            let ticket = aggregator.join(&request, None).unwrap();
            Plane::kernel(aggregator.address(), &request, &ticket)
        };
        sum_all((0..3).map(join).collect(), 3, 40_000);
        let (counters, frames) = (aggregator.counters(), aggregator.plane().frames());
        assert_eq!(counters.counted, 3 * counters.sums);
        assert_eq!(
            (counters.malformed, frames.broken, frames.forwarded),
            (0, 0, 0)
        );
    });
}

#[test]
fn a_worker_on_dpdk_sums_with_one_of_the_kernel_at_an_aggregator_of_the_kernel() {
    with_veth(&["a"], || {
        address();
        let at: SocketAddr = format!("{KERNEL}:{PORT}").parse().unwrap();
        let aggregator = UdpAggregator::start(at, Limits::default()).unwrap();
        let tickets =
            [0, 1].map(|number| aggregator.join(&request("job", number, 2), None).unwrap());
        let workers = vec![
            Plane::kernel(at, &request("job", 0, 2), &tickets[0]),
            Plane::dpdk(&dpdk(), at, &request("job", 1, 2), &tickets[1]),
        ];
        sum_all(workers, 3, 40_000);
    });
}

#[test]
fn an_aggregator_on_dpdk_passes_its_sums_to_a_parent_of_the_kernel() {
    with_veth(&["a"], || {
        address();
        let at: SocketAddr = format!("{KERNEL}:{PORT}").parse().unwrap();
        let parent = UdpAggregator::start(at, Limits::default()).unwrap();
        // The parent's datagrams come to the first core, and have to find the job on the third.
        let three = DpdkConfig {
            threads: 3,
            ..dpdk()
        };
        let children = DpdkPlane::start(&three, Limits::default())
            .unwrap()
            .aggregators();
        let child = &children[2];
        let of_three = |number| JoinJob {
            world: 3,
            ..request("job", number, 2)
        };
        let up = parent.join_rack(&of_three(0), 2, None).unwrap();
        let mut upstream = Some(Upstream::new(at, &up, 2));
        let mut join = |number| {
            let request = of_three(number);
            let ticket = child.join(&request, upstream.take()).unwrap();
            Plane::kernel(child.address(), &request, &ticket)
        };
        let mut workers: Vec<_> = (0..2).map(&mut join).collect();
        // The third is the parent's own, a rack of one.
        let own = of_three(1);
        let ticket = parent.join_rack(&own, 1, None).unwrap();
        workers.push(Plane::kernel(at, &own, &ticket));
        sum_all(workers, 3, 20_000);
        assert_eq!(parent.counters().counted, 2 * parent.counters().sums);
    });
}

#[test]
fn stations_are_asked_for_when_they_have_not_asked() {
    with_veth(&["a"], || {
        address();
        let aggregator = start(&dpdk());
        // The kernel knows where the aggregator is, and so does not ask.
        let mac = ask_for(DPDK);
        let mac: Vec<String> = mac.iter().map(|byte| format!("{byte:02x}")).collect();
        shell(&format!(
            "ip neighbour replace {DPDK} lladdr {} dev a0 nud permanent",
            mac.join(":")
        ))
        .unwrap();
        let request = request("job", 0, 1);
        let ticket = aggregator.join(&request, None).unwrap();
        sum_all(
            vec![Plane::kernel(aggregator.address(), &request, &ticket)],
            1,
            1000,
        );
        assert!(aggregator.plane().frames().unresolved > 0);
    });
}

/// The answer to ARP's question, asked by a station that is not there afterwards.
fn ask_for(ip: &str) -> [u8; 6] {
    let raw = Raw::open("a0");
    let mut room = [0; MAX_FRAME];
    let mac = [2, 0, 0, 0, 0, 77];
    let question = Arp {
        asks: true,
        from: ("10.9.0.77".parse().unwrap(), mac),
        to: (ip.parse().unwrap(), [0; 6]),
    };
    let bytes = question.write(&mut room);
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
fn damaged_frames_are_counted_and_nothing_else() {
    with_veth(&["a"], || {
        let aggregator = start(&dpdk());
        let mac = ask_for(DPDK);
        let from = (
            format!("10.9.0.77:{PORT}").parse().unwrap(),
            [2, 0, 0, 0, 0, 77],
        );
        let to = (format!("{DPDK}:{PORT}").parse().unwrap(), mac);
        let mut room = [0; MAX_FRAME];
        let header = Header::new(Kind::Float, 1, 1, 0).encode();
        let bytes = Route::new(from, to)
            .write(&mut room, &header, &[0; 8])
            .unwrap();
        let raw = Raw::open("a0");
        let good = &room[..bytes];
        let broken = |at: usize| {
            let mut frame = good.to_vec();
            frame[at] ^= 0x10;
            frame
        };
        // Data, checksums, the lengths. (The kernel keeps fragments to itself.)
        let damaged = [45, 58, 40, 24, 17, 39];
        damaged.iter().for_each(|&at| raw.send(&broken(at)));
        raw.send(&good[..50]);
        raw.send(good);
        until("the last frame", || aggregator.counters().received > 0);
        let counters = aggregator.counters();
        assert_eq!((counters.received, counters.strangers), (1, 1));
        until("the count", || {
            aggregator.plane().frames().broken == damaged.len() as u64 + 1
        });
    });
}
