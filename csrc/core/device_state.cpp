#include "core/device_state.h"

namespace vramx {
namespace {

// Small blocks of more than this lie among the large ones. Each page of the zone costs eight bytes
// of the host's memory from the first chunk behind it on.
constexpr Bytes kLargestSmallZone{std::uint64_t{16} << 30};
constexpr std::uint64_t kSmallZoneShare = 8;

Bytes small_zone(Bytes arena, Bytes granularity) {
  return round_down(min(Bytes{arena.count / kSmallZoneShare}, kLargestSmallZone), granularity);
}

}  // namespace

DeviceState::DeviceState(Driver& given, const AllocatorConfig& chosen, const Grounds& granted)
    : driver(given),
      config(chosen),
      grounds(granted),
      granularity(given.granularity()),
      arena(granted.arena.begin, granted.arena.size, granularity,
            small_zone(granted.arena.size, granularity)),
      alias_addresses(granted.aliases.begin, granted.aliases.size),
      order(given),
      trace(chosen.trace_events),
      limit(chosen.limit) {}

void DeviceState::drop_tags_over() {
  arena.drop_tags([&](StreamIndex stream) { return order.has_news(stream); },
                  [&](const Tag& tag) { return order.is_over(tag); });
  order.note_told();
}

}  // namespace vramx
