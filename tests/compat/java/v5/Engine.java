import java.io.IOException;
import java.nio.file.Path;
import java.util.List;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.broker.offset.ConsumerOffsetManager;
import org.apache.rocketmq.broker.subscription.SubscriptionGroupManager;
import org.apache.rocketmq.broker.topic.TopicConfigManager;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.ConfigManager;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.common.topic.TopicValidator;
import org.apache.rocketmq.remoting.protocol.subscription.SubscriptionGroupConfig;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/** What is particular to 5: how a store is made, and the broker's tables under config/. */
final class Engine {
    private Engine() {}

    static DefaultMessageStore make(MessageStoreConfig config) throws IOException {
        config.setTimerWheelEnable(false);
        return new DefaultMessageStore(
            config, new BrokerStatsManager("compat", false), (a, b, c, d, e, f, g) -> {}, new BrokerConfig(),
            new ConcurrentHashMap<>());
    }

    static void sizes(MessageStoreConfig config, int logBytes, int queueBytes) {
        config.setMappedFileSizeCommitLog(logBytes);
        config.setMappedFileSizeConsumeQueue(queueBytes);
    }

    /** Sends a delayed message to its queue, as the broker does before it calls the store. */
    static void delay(MessageExtBrokerInner message) {
        if (message.getDelayTimeLevel() > 0) {
            MessageAccessor.putProperty(message, MessageConst.PROPERTY_REAL_TOPIC, message.getTopic());
            MessageAccessor.putProperty(
                message, MessageConst.PROPERTY_REAL_QUEUE_ID, String.valueOf(message.getQueueId()));
            message.setPropertiesString(MessageDecoder.messageProperties2String(message.getProperties()));
            message.setTopic(TopicValidator.RMQ_SYS_SCHEDULE_TOPIC);
            message.setQueueId(message.getDelayTimeLevel() - 1);
        }
    }

    static List<Table> tables(Path config) {
        return List.of(new Topics(config), new Groups(config), new Offsets(config));
    }

    /** One file of config/: read, changed and written by RocketMQ's own code. */
    abstract static class Table extends ConfigManager {
        private final Path path;
        private final ConfigManager manager;

        Table(Path path, ConfigManager manager) {
            this.path = path;
            this.manager = manager;
        }

        @Override
        public String configFilePath() {
            return path.toString();
        }

        @Override
        public String encode() {
            return manager.encode();
        }

        @Override
        public String encode(boolean pretty) {
            return manager.encode(pretty);
        }

        @Override
        public void decode(String json) {
            manager.decode(json);
        }

        /** Takes one command of the driver; false: it is not for this table. */
        abstract boolean take(Driver.Command command);
    }

    static final class Topics extends Table {
        private final TopicConfigManager topics;

        Topics(Path config) {
            this(config, new TopicConfigManager());
        }

        private Topics(Path config, TopicConfigManager topics) {
            super(config.resolve("topics.json"), topics);
            this.topics = topics;
        }

        @Override
        boolean take(Driver.Command command) {
            if (!command.name.equals("topic")) {
                return false;
            }
            topics.getTopicConfigTable().put(command.get("name"), new TopicConfig(
                command.get("name"), command.number("read", 4), command.number("write", 4), command.number("perm", 6)));
            topics.getDataVersion().nextVersion();
            return true;
        }
    }

    static final class Groups extends Table {
        private final SubscriptionGroupManager groups;

        Groups(Path config) {
            this(config, new SubscriptionGroupManager());
        }

        private Groups(Path config, SubscriptionGroupManager groups) {
            super(config.resolve("subscriptionGroup.json"), groups);
            this.groups = groups;
        }

        @Override
        boolean take(Driver.Command command) {
            if (!command.name.equals("group")) {
                return false;
            }
            SubscriptionGroupConfig group = new SubscriptionGroupConfig();
            group.setGroupName(command.get("name"));
            group.setRetryMaxTimes(command.number("retries", 16));
            groups.getSubscriptionGroupTable().put(group.getGroupName(), group);
            groups.getDataVersion().nextVersion();
            return true;
        }
    }

    static final class Offsets extends Table {
        private final ConsumerOffsetManager offsets;

        Offsets(Path config) {
            this(config, new ConsumerOffsetManager());
        }

        private Offsets(Path config, ConsumerOffsetManager offsets) {
            super(config.resolve("consumerOffset.json"), offsets);
            this.offsets = offsets;
        }

        @Override
        boolean take(Driver.Command command) {
            if (!command.name.equals("offset")) {
                return false;
            }
            offsets.getOffsetTable().computeIfAbsent(
                command.get("topic") + "@" + command.get("group"), key -> new ConcurrentHashMap<>())
                .put(command.number("queue", 0), (long) command.number("offset", 0));
            return true;
        }
    }
}
