//! UDP sockets.
//!
//! | module | subject |
//! | --- | --- |
//! | `linux` | many datagrams for each system call |
//! | `portable` | one datagram for each system call, on other systems |

#[cfg(target_os = "linux")]
mod linux;
#[cfg(any(test, not(target_os = "linux")))]
mod portable;

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;

use socket2::{Domain, Socket, Type};

use base::fork::close_in_children;

#[cfg(target_os = "linux")]
pub use linux::{UdpReceiver, UdpSender};
#[cfg(not(target_os = "linux"))]
pub use portable::{UdpReceiver, UdpSender};

/// Requested size of a socket's buffers in bytes. The kernel may grant less (`net.core.rmem_max`).
pub const SOCKET_BUFFER: usize = 4 << 20;
/// Traffic class of the datagrams (differentiated services code point, RFC 2474), by which a switch recognises them: expedited forwarding.
pub const DSCP: u32 = 46;

/// A socket for the datagrams of this protocol, marked with [`DSCP`].
pub fn bind(address: SocketAddr) -> io::Result<Arc<UdpSocket>> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, None)?;
    close_in_children(&socket);
    match address {
        SocketAddr::V4(_) => socket.set_tos_v4(DSCP << 2)?,
        SocketAddr::V6(_) => {
            socket.set_tclass_v6(DSCP << 2)?;
            // For IPv4 hosts of a socket for both; not every system has it.
            let _ = socket.set_tos_v4(DSCP << 2);
        }
    }
    socket.set_recv_buffer_size(SOCKET_BUFFER)?;
    socket.set_send_buffer_size(SOCKET_BUFFER)?;
    socket.bind(&address.into())?;
    Ok(Arc::new(socket.into()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::time::Duration;

    use super::*;
    use crate::Transmit;
    use crate::packet::{MAX_DATAGRAM, PacketHeader};

    const COUNT: usize = 250;

    /// The tests of both implementations.
    macro_rules! tests_of {
        ($implementation:ident) => {
            mod $implementation {
                use super::super::$implementation::{UdpReceiver, UdpSender};
                use super::*;

                #[test]
                #[cfg_attr(miri, ignore = "a socket of the kernel")]
                fn datagrams_arrive_whole_in_order_and_with_their_source() {
                    for loopback in ["127.0.0.1:0", "[::1]:0"] {
                        let here = loopback.parse().unwrap();
                        let Ok(receiver) = bind(here) else {
                            // Not `eprintln!`, which the test harness captures. The configuration of nextest shows it.
                            let mut stderr = std::io::stderr();
                            writeln!(stderr, "skipped: the address {loopback} is not there").unwrap();
                            continue;
                        };
                        let mut sending = UdpSender::new(bind(here).unwrap());
                        let to = receiver.local_addr().unwrap();
                        let from = sending.socket().local_addr().unwrap();
                        let mut receiving = UdpReceiver::new(receiver);
                        receiving.wait(Duration::ZERO).unwrap();
                        assert_eq!(receiving.iter().count(), 0);
                        // Batches and single datagrams: lengths that stay equal for a while, rise and fall.
                        let length = |i: usize| match i {
                            ..100 => 1 + i * MAX_DATAGRAM / 101,
                            100..180 => MAX_DATAGRAM,
                            _ => 300 - i,
                        };
                        for i in 0..COUNT {
                            sending.send(to, &[i as u8], &vec![7; length(i) - 1]);
                        }
                        sending.flush();
                        assert_eq!((sending.sent, sending.refused), (COUNT as u64, 0));
                        let mut seen = 0;
                        while seen < COUNT {
                            receiving.wait(Duration::from_secs(10)).unwrap();
                            assert!(receiving.iter().count() > 0);
                            for (source, datagram) in receiving.iter() {
                                assert_eq!(source, from);
                                assert_eq!(datagram[0], seen as u8);
                                assert_eq!(datagram.len(), length(seen));
                                seen += 1;
                            }
                        }
                    }
                }

                #[test]
                #[cfg_attr(miri, ignore = "a socket of the kernel")]
                fn a_datagram_that_is_too_long_is_not_cut_to_a_valid_one() {
                    let receiver = bind("127.0.0.1:0".parse().unwrap()).unwrap();
                    let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
                    let to = receiver.local_addr().unwrap();
                    sender.send_to(&[0x10; 4000], to).unwrap();
                    let mut receiving = UdpReceiver::new(receiver);
                    receiving.wait(Duration::from_secs(10)).unwrap();
                    let (_, datagram) = receiving.iter().next().unwrap();
                    assert!(datagram.len() > MAX_DATAGRAM);
                    assert!(PacketHeader::decode(datagram).is_none());
                }
            }
        };
    }

    #[cfg(target_os = "linux")]
    tests_of!(linux);
    tests_of!(portable);
}
