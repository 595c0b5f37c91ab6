import java.io.IOException;
import java.nio.file.Path;
import java.util.List;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentMap;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.ConfigManager;
import org.apache.rocketmq.common.DataVersion;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.protocol.body.ConsumerOffsetSerializeWrapper;
import org.apache.rocketmq.common.protocol.body.SubscriptionGroupWrapper;
import org.apache.rocketmq.common.protocol.body.TopicConfigSerializeWrapper;
import org.apache.rocketmq.common.subscription.SubscriptionGroupConfig;
import org.apache.rocketmq.remoting.protocol.RemotingSerializable;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.MessageExtBrokerInner;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/** What is particular to 4.9: how a store is made, and the tables under config/. */
final class Engine {
    private Engine() {}

    static DefaultMessageStore make(MessageStoreConfig config) throws IOException {
        return new DefaultMessageStore(
            config, new BrokerStatsManager("compat", false), (a, b, c, d, e, f, g) -> {}, new BrokerConfig());
    }

    static void sizes(MessageStoreConfig config, int logBytes, int queueBytes) {
        config.setMappedFileSizeCommitLog(logBytes);
        config.setMappedFileSizeConsumeQueue(queueBytes);
    }

    /** The store itself sends delayed messages to their queue. */
    static void delay(MessageExtBrokerInner message) {}

    static List<Table> tables(Path config) {
        return List.of(new Topics(config), new Groups(config), new Offsets(config));
    }

    /** One file of config/: read, changed and written by RocketMQ's own code. */
    abstract static class Table extends ConfigManager {
        private final Path path;

        Table(Path path) {
            this.path = path;
        }

        @Override
        public String configFilePath() {
            return path.toString();
        }

        @Override
        public String encode() {
            return encode(false);
        }

        /** Takes one command of the driver; false: it is not for this table. */
        abstract boolean take(Driver.Command command);
    }

    static final class Topics extends Table {
        private TopicConfigSerializeWrapper table = new TopicConfigSerializeWrapper();

        Topics(Path config) {
            super(config.resolve("topics.json"));
            table.setTopicConfigTable(new ConcurrentHashMap<>());
            table.setDataVersion(new DataVersion());
        }

        @Override
        public void decode(String json) {
            table = RemotingSerializable.fromJson(json, TopicConfigSerializeWrapper.class);
        }

        @Override
        public String encode(boolean pretty) {
            return table.toJson(pretty);
        }

        @Override
        boolean take(Driver.Command command) {
            if (!command.name.equals("topic")) {
                return false;
            }
            table.getTopicConfigTable().put(command.get("name"), new TopicConfig(
                command.get("name"), command.number("read", 4), command.number("write", 4), command.number("perm", 6)));
            table.getDataVersion().nextVersion();
            return true;
        }
    }

    static final class Groups extends Table {
        private SubscriptionGroupWrapper table = new SubscriptionGroupWrapper();

        Groups(Path config) {
            super(config.resolve("subscriptionGroup.json"));
            table.setSubscriptionGroupTable(new ConcurrentHashMap<>());
            table.setDataVersion(new DataVersion());
        }

        @Override
        public void decode(String json) {
            table = RemotingSerializable.fromJson(json, SubscriptionGroupWrapper.class);
        }

        @Override
        public String encode(boolean pretty) {
            return table.toJson(pretty);
        }

        @Override
        boolean take(Driver.Command command) {
            if (!command.name.equals("group")) {
                return false;
            }
            SubscriptionGroupConfig group = new SubscriptionGroupConfig();
            group.setGroupName(command.get("name"));
            group.setRetryMaxTimes(command.number("retries", 16));
            table.getSubscriptionGroupTable().put(group.getGroupName(), group);
            table.getDataVersion().nextVersion();
            return true;
        }
    }

    static final class Offsets extends Table {
        private ConsumerOffsetSerializeWrapper table = new ConsumerOffsetSerializeWrapper();

        Offsets(Path config) {
            super(config.resolve("consumerOffset.json"));
            table.setOffsetTable(new ConcurrentHashMap<>());
        }

        @Override
        public void decode(String json) {
            table = RemotingSerializable.fromJson(json, ConsumerOffsetSerializeWrapper.class);
        }

        @Override
        public String encode(boolean pretty) {
            return table.toJson(pretty);
        }

        @Override
        boolean take(Driver.Command command) {
            if (!command.name.equals("offset")) {
                return false;
            }
            ConcurrentMap<Integer, Long> queues = table.getOffsetTable().computeIfAbsent(
                command.get("topic") + "@" + command.get("group"), key -> new ConcurrentHashMap<>());
            queues.put(command.number("queue", 0), (long) command.number("offset", 0));
            return true;
        }
    }
}
