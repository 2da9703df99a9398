//! F-Stack's TCP over DPDK, a network stack of clients and servers. Without the feature `fstack` only its name and settings are known,
//! `innet-replay doctor` checks for its components, and any use gives one clear error.
//!
//! | module | subject |
//! | --- | --- |
//! | this file | implementation of [`Plugin`] |
//! | [`config`] | F-Stack's configuration file, with a section of our own |
//! | [`doctor`] | checks of the machine for F-Stack |
//! | `tcp` | sockets, and the reactor that runs F-Stack's loop (feature `fstack`) |

pub mod config;
pub mod doctor;
#[cfg(feature = "fstack")]
pub mod tcp;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use replay_link::error::{Result, refuse};
use replay_link::stack::Address;
use replay_link::stack::plugged::{PluggedStack, StackClient};
use replay_server::config::ServerConfig;
use replay_server::plugin::{self, Finding, MachineFiles, Plugin};
use replay_server::server::{JoinTask, ServeTask};

use config::Config;

const NOT_BUILT_IN: &str = "this program was built without F-Stack: install F-Stack (https://github.com/F-Stack/f-stack) and build \
                            again with the cargo feature `fstack`";

/// Plugs F-Stack in.
pub fn plug_in() {
    plugin::plug_in(&Plug);
}

/// Release of F-Stack that this program was built with, `"unknown"` if undetermined; `None` without F-Stack.
pub fn release() -> Option<&'static str> {
    #[cfg(feature = "fstack")]
    return Some(fstack_sys::fstack::RELEASE.unwrap_or("unknown"));
    #[cfg(not(feature = "fstack"))]
    None
}

/// The plug-in.
struct Plug;

impl PluggedStack for Plug {
    fn name(&self) -> &'static str {
        "fstack"
    }

    fn title(&self) -> &'static str {
        "F-Stack"
    }

    fn help(&self) -> &'static str {
        "F-Stack's TCP over DPDK: needs a program built with that feature, serves TCP at the IP addresses of its ports, with one \
         thread. --stack-config is F-Stack's file, with an additional section `[innet]` for DPDK's arguments, one `eal` line each"
    }

    fn client(&self, address: &Address, file: Option<&Path>, spin: bool) -> Result<Arc<dyn StackClient>> {
        if spin {
            return refuse(format!(
                "spin is for the kernel's sockets, and {address} uses F-Stack, which polls anyway: leave spin out"
            ));
        }
        check_built_in()?;
        let Some(file) = file else {
            return refuse(format!("{address} needs F-Stack's configuration file (config)"));
        };
        tcp::client(address, file)
    }
}

impl Plugin for Plug {
    fn name(&self) -> &'static str {
        PluggedStack::name(self)
    }

    fn log_targets(&self) -> &'static [&'static str] {
        &[env!("CARGO_CRATE_NAME")]
    }

    fn stack(&self) -> Option<&'static dyn PluggedStack> {
        Some(&Plug)
    }

    fn check(&self, config: &ServerConfig) -> Result<()> {
        if config.stack_config.is_none() {
            return refuse("stack is fstack: name F-Stack's configuration file in stack_config");
        }
        if config.spin {
            return refuse(
                "spin is for the kernel's sockets; F-Stack polls unless idle_sleep is set in its file: leave spin out",
            );
        }
        if config.io_threads > 1 {
            return refuse(format!(
                "io_threads is {}, but F-Stack has one thread in a process: leave io_threads out",
                config.io_threads
            ));
        }
        for address in &config.listen {
            if socket_address(address)?.ip().is_loopback() {
                return refuse(format!(
                    "{address} is a loopback address, which F-Stack does not have: listen on the address of one of its ports (addr in \
                     stack_config)"
                ));
            }
        }
        Ok(())
    }

    fn check_files(&self, config: &ServerConfig) -> Result<()> {
        check_built_in()?;
        config.stack_config.as_deref().map_or(Ok(()), |file| Config::read(file).map(drop))
    }

    fn findings(&self, config: &ServerConfig, _: &MachineFiles) -> Result<Vec<Finding>> {
        // Defaults without a file: a network card on hugepages, and any core.
        let config = config.stack_config.as_deref().map(Config::read).transpose()?.unwrap_or_default();
        Ok(doctor::Machine::this().findings(&config))
    }

    fn serve(&self, config: &ServerConfig, task: ServeTask) -> Result<JoinTask> {
        let file = config.stack_config.as_deref().unwrap_or(Path::new(""));
        tcp::serve(&Config::read(file)?, task)
    }
}

/// The address for F-Stack's sockets. Host names are not resolved: the kernel's resolver would block the reactor.
///
/// # Errors
/// [`Error::Config`](replay_link::error::Error::Config) for anything but an IP address.
pub fn socket_address(address: &Address) -> Result<SocketAddr> {
    let Address::Tcp { host, port, .. } = address else {
        return refuse(format!(
            "{address} is a socket file, which F-Stack cannot open: use innet://address:port, or the kernel's stack"
        ));
    };
    match host.parse() {
        Ok(ip) => Ok(SocketAddr::new(ip, *port)),
        Err(_) => refuse(format!("{address} has a host name: with F-Stack write its IP address")),
    }
}

fn check_built_in() -> Result<()> {
    match release() {
        Some(_) => Ok(()),
        None => refuse(NOT_BUILT_IN),
    }
}

/// Replacement without the feature: every call fails.
#[cfg(not(feature = "fstack"))]
mod tcp {
    use super::*;

    pub fn serve(_: &Config, _: ServeTask) -> Result<JoinTask> {
        refuse(NOT_BUILT_IN)
    }

    pub fn client(_: &Address, _: &Path) -> Result<Arc<dyn StackClient>> {
        refuse(NOT_BUILT_IN)
    }
}
