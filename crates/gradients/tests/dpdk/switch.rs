//! An aggregator with two devices, a switch between two veth pairs.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use base::wait::Wait;
use gradients::ethernet::{Arp, BROADCAST, HeaderTemplate, MAX_FRAME};
use gradients::packet::{PacketHeader, PacketKind};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

use crate::setup::*;

const SWITCH: &str = "10.9.0.9";
const HERE: [u8; 6] = [2, 0, 0, 0, 0, 1];
const THERE: [u8; 6] = [2, 0, 0, 0, 0, 2];

/// A frame of this protocol, to `to`.
fn datagram(to: &str) -> Vec<u8> {
    let from = ("10.9.0.1:4000".parse().unwrap(), HERE);
    let to = (format!("{to}:{PORT}").parse().unwrap(), THERE);
    let mut room = [0; MAX_FRAME];
    let header = PacketHeader::new(PacketKind::Float, 1, 1, 0).encode();
    let bytes = HeaderTemplate::new(from, to).write(&mut room, &header, &[1; 8]);
    room[..bytes.unwrap()].to_vec()
}

fn unmarked(mut frame: Vec<u8>) -> Vec<u8> {
    frame[15] = 0;
    // The header's checksum is updated (RFC 1624).
    let old = u16::from_be_bytes([frame[24], frame[25]]);
    let sum = u32::from(old) + 0x00B8;
    let new = (sum as u16).wrapping_add((sum >> 16) as u16);
    frame[24..26].copy_from_slice(&new.to_be_bytes());
    frame
}

fn arp(target: &str) -> Vec<u8> {
    let mut room = [0; MAX_FRAME];
    let request =
        Arp { is_request: true, from: ("10.9.0.1".parse().unwrap(), HERE), to: (target.parse().unwrap(), [0; 6]) };
    let bytes = request.write(&mut room);
    room[..bytes].to_vec()
}

/// Frames of many kinds that are not for the switch.
fn others() -> Vec<Vec<u8>> {
    let mut rng = StdRng::seed_from_u64(5);
    let kinds: [u16; 6] = [0x0800, 0x86DD, 0x0806, 0x88CC, 0x8847, 0x05DC];
    let mut frames: Vec<Vec<u8>> = (0..600)
        .map(|i| {
            let bytes = match i {
                0 => 60,
                1 => 1514,
                _ => rng.random_range(60..=1514),
            };
            let mut frame = vec![0; bytes];
            rng.fill_bytes(&mut frame);
            frame[..6].copy_from_slice(if i % 7 == 0 { &BROADCAST } else { &THERE });
            frame[6..12].copy_from_slice(&HERE);
            frame[12..14].copy_from_slice(&kinds[i % kinds.len()].to_be_bytes());
            frame
        })
        .collect();
    // Marked, but for another host; for the switch, but not marked; ARP for another host.
    frames.extend([datagram("10.9.0.8"), unmarked(datagram(SWITCH)), arp("10.9.0.8")]);
    frames
}

#[test]
fn a_switch_forwards_other_frames_unchanged_and_receives_its_own() {
    with_veth(&["a", "b"], || {
        let aggregator = start(&config(SWITCH, &[af_packet("a1"), af_packet("b1")]));
        for (here, there) in [("a0", "b0"), ("b0", "a0")] {
            let (here, there) = (Raw::open(here), Raw::open(there));
            let before = aggregator.aggregator().counters().received;
            for frame in others() {
                // The first two must not come out; the third does, unchanged.
                here.send(&datagram(SWITCH));
                here.send(&arp(SWITCH));
                here.send(&frame);
                assert_eq!(there.receive(), frame);
                let answer = here.receive();
                assert_eq!((&answer[..6], &answer[20..22]), (&HERE[..], &[0, 2][..]));
            }
            let sent = others().len() as u64;
            until("the last datagram", || aggregator.aggregator().counters().received - before == sent);
            // Their session is unknown.
            let counters = aggregator.aggregator().counters();
            assert_eq!(counters.strangers, counters.received);
        }
        let frames = aggregator.aggregator().frames.unwrap();
        assert_eq!((frames.broken, frames.others, frames.refused), (0, 0, 0));
    });
}

#[test]
fn hosts_on_both_sides_of_a_switch_sum_at_it_and_communicate_through_it() {
    with_veth(&["a", "b"], || {
        shell("ip address add 10.9.0.1/24 dev a0").unwrap();
        let aggregator = start(&config(SWITCH, &[af_packet("a1"), af_packet("b1")]));
        let join = |number| {
            let request = request("job", number, 2);
            let ticket = aggregator.join(&request, None).unwrap();
            (request, ticket)
        };
        let (near, far) = (join(0), join(1));
        let text: Vec<u8> = (0..1_000_000u64).map(|i| ((i * i) >> 7) as u8).collect();
        let (ready, listens) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let text = &text;
            scope.spawn(move || {
                let mut worker = work(None, &near.0, &near.1);
                listens.recv().unwrap();
                let stream = scope.spawn(move || {
                    let mut stream = TcpStream::connect("10.9.0.2:80").unwrap();
                    stream.write_all(text).unwrap();
                });
                for _ in 0..5 {
                    let mut values = vec![1.0; 20_000];
                    worker.sum(&mut values, false, LONG, &Wait::forever()).unwrap();
                    assert!(values.iter().all(|&value| value == 3.0));
                }
                stream.join().unwrap();
            });
            elsewhere("b0", move || {
                shell("ip address add 10.9.0.2/24 dev b0; ip link set b0 up").unwrap();
                let mut worker = work(None, &far.0, &far.1);
                let listener = TcpListener::bind("10.9.0.2:80").unwrap();
                let reader = std::thread::spawn(move || {
                    let mut read = Vec::new();
                    listener.accept().unwrap().0.read_to_end(&mut read).unwrap();
                    read
                });
                ready.send(()).unwrap();
                for _ in 0..5 {
                    let mut values = vec![2.0; 20_000];
                    worker.sum(&mut values, false, LONG, &Wait::forever()).unwrap();
                    assert!(values.iter().all(|&value| value == 3.0));
                }
                assert!(reader.join().unwrap() == *text, "the stream was changed");
            });
        });
        let counters = aggregator.aggregator().counters();
        assert_eq!(counters.counted, 2 * counters.sums);
        // A megabyte in frames of 1,500 bytes.
        until("the stream", || aggregator.aggregator().frames.unwrap().forwarded > 600);
    });
}
