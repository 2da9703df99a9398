//! Workers and aggregator on memif, which bypasses the kernel.

use std::time::Duration;

use base::wait::Wait;
use gradients::dpdk::DpdkTransport;
use gradients::{AggregatorLimits, Arithmetic, DpdkConfig, Error, JoinJob, Ticket, Worker, dpdk_aggregators};

use crate::setup::*;

const AGGREGATOR: &str = "10.8.0.1";

/// Configurations of the aggregator and of each worker, with a memif for each worker.
fn configs(workers: usize) -> (tempfile::TempDir, DpdkConfig, Vec<DpdkConfig>) {
    let folder = tempfile::tempdir().unwrap();
    let mut servers = Vec::new();
    let mut clients = Vec::new();
    for worker in 0..workers {
        let socket = folder.path().join(format!("{worker}.sock"));
        let device = |role| format!("net_memif{},role={role},id=0,socket={}", number(), socket.display());
        servers.push(device("server"));
        clients.push(config(&format!("10.8.0.{}", 2 + worker), &[device("client")]));
    }
    (folder, config(AGGREGATOR, &servers), clients)
}

#[test]
fn workers_sum_over_memif() {
    let _alone = alone();
    for arithmetic in [Arithmetic::Float, Arithmetic::Fixed] {
        let (_folder, server, clients) = configs(4);
        let aggregator = start(&server);
        let join = |(number, client): (u16, &DpdkConfig)| {
            let request = JoinJob { arithmetic, ..request("job", number, 4) };
            let ticket = aggregator.join(&request, None).unwrap();
            work(Some(client), &request, &ticket)
        };
        sum_all((0..).zip(&clients).map(join).collect(), 4, 50_000);
        let counters = aggregator.aggregator().counters();
        assert_eq!(counters.counted, 4 * counters.sums);
        assert_eq!((counters.strangers, counters.malformed), (0, 0));
        let frames = aggregator.aggregator().frames.unwrap();
        assert_eq!((frames.broken, frames.forwarded), (0, 0));
    }
}

#[test]
fn each_core_sums_its_own_jobs_at_a_port_of_its_own() {
    let _alone = alone();
    let (_folder, server, clients) = configs(4);
    let several = DpdkConfig { threads: 3, ..server };
    let aggregators = dpdk_aggregators(&several, AggregatorLimits::default()).unwrap();
    let ports: Vec<u16> = aggregators.iter().map(|one| one.address().port()).collect();
    assert_eq!(ports, [PORT, PORT + 1, PORT + 2]);
    // A memif has one queue: the first core hands datagrams over to the others.
    let join = |(number, client): (u16, &DpdkConfig)| {
        let aggregator = &aggregators[1 + usize::from(number / 2)];
        let request = request(&format!("job-{}", number / 2), number % 2, 2);
        let ticket = aggregator.join(&request, None).unwrap();
        work(Some(client), &request, &ticket)
    };
    let mut workers: Vec<_> = (0..).zip(&clients).map(join).collect();
    let others = workers.split_off(2);
    std::thread::scope(|scope| {
        scope.spawn(|| sum_all(workers, 3, 30_000));
        scope.spawn(|| sum_all(others, 3, 30_000));
    });
    let counters: Vec<_> = aggregators.iter().map(|one| one.aggregator().counters()).collect();
    assert_eq!(counters[0].received, 0);
    for of_one in &counters[1..] {
        assert!(of_one.sums > 0);
        assert_eq!(of_one.counted, 2 * of_one.sums);
        assert_eq!(of_one.strangers, 0);
    }
    assert_eq!(aggregators[0].aggregator().frames.unwrap().overrun, 0);
}

#[test]
fn a_worker_that_is_gone_is_named() {
    let _alone = alone();
    let (_folder, server, clients) = configs(2);
    let aggregator = start(&server);
    let soon = |number| JoinJob { deadline: Duration::from_millis(500), ..request("job", number, 2) };
    let tickets = [0, 1].map(|number| aggregator.join(&soon(number), None).unwrap());
    let mut worker = work(Some(&clients[0]), &soon(0), &tickets[0]);
    let other = work(Some(&clients[1]), &soon(1), &tickets[1]);
    drop(other);
    let missing = worker.sum(&mut [1.0; 1000], false, LONG, &Wait::forever()).unwrap_err();
    assert!(matches!(&missing, Error::Missing { workers, .. } if workers == &[1]), "{missing}");
    assert!(missing.to_string().contains("host-1"), "{missing}");
}

#[test]
fn a_missing_aggregator_is_an_error_at_the_deadline() {
    let _alone = alone();
    let (_folder, server, clients) = configs(1);
    let aggregator = start(&server);
    let request = request("job", 0, 1);
    let nobody = "10.8.0.99:7711".parse().unwrap();
    let ticket = Ticket { address: nobody, ..aggregator.join(&request, None).unwrap() };
    let soon = Duration::from_millis(50);
    let device = DpdkTransport::open(&clients[0]).unwrap();
    let silent = Worker::join(device, &request, &ticket, soon, &Wait::forever());
    assert!(matches!(silent.err(), Some(Error::Silent { .. })));
}
